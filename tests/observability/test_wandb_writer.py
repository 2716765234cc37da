"""The real wandb, offline."""

import json
import sys

import pytest

from vime.errors import ConfigError
from vime.observability.metrics import UnknownMetric
from vime.observability.wandb_writer import WandbWriter, find_run_id


@pytest.fixture
def start(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the optional extra wandb")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    (tmp_path / "run").mkdir()

    def start(run_id=None):
        return WandbWriter(
            folder=tmp_path / "run",
            keep_id_in=[tmp_path / "run", tmp_path / "checkpoints"],
            run_id=run_id,
            settings={"rollout": {"num_rollout": 3}},
            mode="offline",
            directory=tmp_path / "run",
            project="test",
            group="a group",
            entity=None,
            host=None,
        )

    return start


def test_a_resumed_run_goes_on_in_the_same_wandb_run(start, tmp_path):
    writer = start()
    writer.write(0, {"train/loss": 0.5})
    with pytest.raises(UnknownMetric):
        writer.write(1, {"train/losss": 0.5})
    writer.close()
    first = find_run_id([tmp_path / "nowhere", tmp_path / "checkpoints"])
    assert first is not None and find_run_id([tmp_path / "run"]) == first
    again = start(find_run_id([tmp_path / "run"]))
    again.write(0, {"train/loss": 0.25})
    again.close()
    assert find_run_id([tmp_path / "run"]) == first
    files = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*-{first}/run-{first}.wandb"))
    assert files and b"train/loss" in files[-1].read_bytes()


def test_the_missing_package_is_named_with_its_remedy(start, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"vime\[wandb\]"):
        start()


def test_no_run_id_without_a_run(tmp_path):
    assert find_run_id([tmp_path]) is None
    (tmp_path / "wandb.json").write_text(json.dumps({"run_id": "abc"}))
    assert find_run_id([tmp_path]) == "abc"
