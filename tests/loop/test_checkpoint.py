import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vime.errors import ConfigError, TrainingError
from vime.loop.checkpoint import find_latest, load_checkpoint, save_checkpoint


class FakeTrainer:
    def __init__(self, fail: bool = False) -> None:
        self.fail, self.loaded = fail, ""

    def save(self, path: Path) -> None:
        path.mkdir()
        (path / "weights").write_text("w")
        if self.fail:
            raise OSError(28, "No space left on device")

    def load(self, path: Path) -> None:
        self.loaded = (path / "weights").read_text()


class FakeSource:
    def __init__(self, offset: int = 0) -> None:
        self.offset = offset

    def state(self) -> dict[str, Any]:
        return {"offset": self.offset}

    def restore(self, state: dict[str, Any]) -> None:
        self.offset = state["offset"]


def test_the_newest_checkpoint_restores_trainer_and_data(tmp_path: Path) -> None:
    for rollout_id in (1, 12):
        save_checkpoint(tmp_path, rollout_id, FakeTrainer(), FakeSource(rollout_id * 8))
    trainer, source = FakeTrainer(), FakeSource()
    restored = load_checkpoint(tmp_path, trainer, source)
    assert (restored.next_rollout_id, source.offset, trainer.loaded) == (13, 96, "w")


def test_a_full_disk_leaves_the_older_checkpoint_and_no_partial_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, FakeTrainer(), FakeSource())
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, 2, FakeTrainer(fail=True), FakeSource())
    assert [p.name for p in tmp_path.iterdir()] == ["rollout_000001"]


def test_a_writer_that_does_not_say_that_the_disk_is_full_is_translated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Trainer(FakeTrainer):
        def save(self, path: Path) -> None:
            raise TrainingError("unexpected pos 704 vs 598")

    with pytest.raises(TrainingError):
        save_checkpoint(tmp_path, 2, Trainer(), FakeSource())
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=4096))
    with pytest.raises(OSError, match="checkpoint of rollout 2: the disk is full"):
        save_checkpoint(tmp_path, 2, Trainer(), FakeSource())
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    class Trainer(FakeTrainer):
        def load(self, path: Path) -> None:
            raise TrainingError("training rank 0 failed")

    path = save_checkpoint(tmp_path, 1, FakeTrainer(), FakeSource())
    with pytest.raises(TrainingError, match=r"rollout_000001 cannot be loaded; if it is damaged, move it away"):
        load_checkpoint(tmp_path, Trainer(), FakeSource())
    (path / "state.json").write_text('{"format": ')
    with pytest.raises(ConfigError, match=r"rollout_000001: state.json is damaged .*; move it away"):
        load_checkpoint(tmp_path, FakeTrainer(), FakeSource())


def test_a_folder_without_state_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "rollout_000009" / "trainer").mkdir(parents=True)
    assert find_latest(tmp_path) is None
    assert find_latest(tmp_path / "nowhere") is None
    with pytest.raises(ConfigError, match="no checkpoint there"):
        load_checkpoint(tmp_path, FakeTrainer(), FakeSource())


def test_the_same_rollout_saved_again_replaces_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 3, FakeTrainer(), FakeSource(1))
    path = save_checkpoint(tmp_path, 3, FakeTrainer(), FakeSource(2))
    assert json.loads((path / "state.json").read_text())["data_source"] == {"offset": 2}


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 0, FakeTrainer(), FakeSource())
    (path / "state.json").write_text(json.dumps({"format": 99, "rollout_id": 0, "data_source": {}}))
    with pytest.raises(ConfigError, match="format 99"):
        load_checkpoint(tmp_path, FakeTrainer(), FakeSource())
