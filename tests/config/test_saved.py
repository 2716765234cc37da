"""A run's settings, read back from its folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from vime.config import Config, RolloutConfig, TrainConfig
from vime.config.saved import read_saved
from vime.errors import ConfigError
from vime.observability.run_folder import RunFolder


def test_the_settings_of_a_run_come_back_as_they_were(tmp_path: Path) -> None:
    config = Config(
        rollout=RolloutConfig(rollout_temperature=0.7, rollout_stop=["a", "b"]),
        train=TrainConfig(max_tokens_per_gpu=512),
        megatron={"bf16": True, "lr": 1e-6},
        vllm={"max_num_seqs": 8},
    )
    RunFolder(tmp_path).write_config({"program": "train.py", "settings": config})
    assert read_saved(tmp_path) == config


def test_settings_of_another_version_are_left_out_or_have_their_default(tmp_path: Path) -> None:
    settings = {"rollout": {"rollout_temperature": 0.5, "of_another_version": 1}, "unknown": {"a": 1}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"settings": settings}))
    assert read_saved(tmp_path) == Config(rollout=RolloutConfig(rollout_temperature=0.5))


@pytest.mark.parametrize("text", ["", "a: 1", "settings: 3", "- 1"])
def test_a_file_that_is_no_runs_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"holds no settings of a run"):
        read_saved(tmp_path)
