"""External engines: what is checked before a run relies on one, on a real engine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from vime.config import ClusterConfig, Config, RolloutConfig
from vime.engine.vllm.processes import free_port
from vime.engine.vllm.server import EngineServer
from vime.errors import ConfigError
from vime.orchestration.external import ExternalFleet, model_difference


@pytest.fixture
def key_file(run_key: str, tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(run_key + "\n")
    path.chmod(0o600)
    return path


def settings(address: str, key_file: Path, **megatron: Any) -> Config:
    cluster = ClusterConfig(rollout_external_engine_addrs=[address], rollout_external_engine_key_file=str(key_file))
    return Config(cluster=cluster, rollout=RolloutConfig(rollout_max_context_len=512), megatron=megatron)


@pytest.mark.engine
def test_an_engine_that_fits_is_used_through_the_router_and_left_running(
    engine: EngineServer, tiny_qwen3: Path, key_file: Path, tmp_path: Path
) -> None:
    address = engine.url.removeprefix("http://")
    hf_config = json.loads((tiny_qwen3 / "config.json").read_text())
    fleet = ExternalFleet(settings(address, key_file), hf_config=hf_config, log_dir=tmp_path)
    assert fleet.num_readers == 1
    fleet.wait_ready(60)
    fleet.check_alive()
    fleet.close()
    assert engine.is_alive()


@pytest.mark.engine
def test_an_engine_that_does_not_fit_is_refused_with_every_reason(
    engine: EngineServer, tiny_qwen3: Path, key_file: Path, tmp_path: Path
) -> None:
    address = engine.url.removeprefix("http://")
    hf_config = json.loads((tiny_qwen3 / "config.json").read_text())
    config = settings(address, key_file, bf16=True)
    config = dataclasses.replace(config, rollout=RolloutConfig(rollout_max_context_len=4096))
    with pytest.raises(ConfigError) as caught:
        ExternalFleet(config, hf_config={**hf_config, "vocab_size": 999}, log_dir=tmp_path)
    text = "\n".join(caught.value.problems)
    assert "has dtype 'float32', the run 'bfloat16'" in text
    assert "vocab_size is 320 there, 999 here" in text
    assert "at most 512 tokens, the run needs 4096" in text
    key_file.write_text("another key")
    with pytest.raises(ConfigError, match="refuses the key in"):
        ExternalFleet(settings(address, key_file), hf_config=hf_config, log_dir=tmp_path)


def test_an_address_where_nobody_listens_is_named(key_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not answer"):
        ExternalFleet(settings(f"127.0.0.1:{free_port()}", key_file), hf_config={}, log_dir=tmp_path)


def test_models_are_compared_by_what_they_compute() -> None:
    ours = {"vocab_size": 8, "dtype": "float32", "transformers_version": "5"}
    assert model_difference({"vocab_size": 8, "torch_dtype": "bfloat16"}, ours) is None
    assert model_difference({"vocab_size": 9, "x": 1}, ours) == "vocab_size is 9 there, 8 here, x is 1 there, None here"
