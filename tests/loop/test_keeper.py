"""Which checkpoints stay, and HF exports that are whole or not there."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from vime.config.validate_checkpoint import parse_best
from vime.errors import ConfigError, DataError, TrainingError
from vime.loop.cadence import StopRule
from vime.loop.checkpoint import find_checkpoints, open_checkpoint, read_metrics
from vime.loop.keeper import CheckpointKeeper, best_checkpoint, export_hf, prune, remove_leftovers


class FakeTrainer:
    fail = False

    def save(self, path: Path) -> None:
        path.mkdir()
        if self.fail:
            raise OSError(28, "No space left on device")

    def export_hf(self, path: Path) -> None:
        path.mkdir(parents=True)
        (path / "model.safetensors").write_text("w")
        if self.fail:
            raise OSError(28, "No space left on device")
        (path / "config.json").write_text("{}")


class FakeSource:
    def state(self) -> dict[str, Any]:
        return {}


def keeper(folder: Path, trainer: FakeTrainer | None = None, **more: Any) -> CheckpointKeeper:
    made: Any = CheckpointKeeper
    return made(trainer or FakeTrainer(), FakeSource(), StopRule(), folder=folder, settings={}, **more)


def names(folder: Path) -> list[int]:
    return [int(path.name[-6:]) for path in find_checkpoints(folder)]


def run(keep: CheckpointKeeper, values: dict[int, float | None], metric: str = "eval/heldout") -> None:
    for rollout_id, value in values.items():
        keep.save(rollout_id)
        keep.settle(rollout_id, {} if value is None else {metric: value})


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    keep = keeper(tmp_path, keep_last=2, keep_best="eval/heldout")
    run(keep, {0: 0.1, 1: 0.9, 2: None, 3: 0.2, 4: float("nan")})
    assert names(tmp_path) == [1, 3, 4]
    run(keep, {5: 0.9})
    assert names(tmp_path) == [4, 5], "the newer of equals is the best"
    assert read_metrics(tmp_path / "rollout_000005") == {"eval/heldout": 0.9}


def test_of_a_linked_checkpoint_the_link_goes_and_damaged_metrics_are_named(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    keep = keeper(here, keep_last=1, keep_best="train/loss:min")
    run(keep, {0: 0.5}, metric="train/loss")
    (here / "rollout_000000").rename(there)
    (here / "rollout_000000").symlink_to(there)
    run(keep, {1: 0.25}, metric="train/loss")
    assert names(here) == [1] and (there / "state.json").is_file()
    (here / "rollout_000001" / "metrics.json").write_text("[1")
    with pytest.raises(TrainingError, match=r"rollout_000001/metrics.json is damaged; remove it"):
        run(keep, {2: 0.125}, metric="train/loss")


def test_less_may_be_better(tmp_path: Path) -> None:
    run(
        keeper(tmp_path, keep_last=1, keep_best="train/loss:min"),
        {0: 0.5, 1: 0.25, 2: 0.75},
        metric="train/loss",
    )
    assert names(tmp_path) == [1, 2]
    assert best_checkpoint(tmp_path, "train/loss", more_is_better=False) == tmp_path / "rollout_000001"


def test_without_a_limit_all_stay_and_the_last_one_always_does(tmp_path: Path) -> None:
    run(keeper(tmp_path), {0: None, 1: None, 2: None})
    assert names(tmp_path) == [0, 1, 2]
    prune(tmp_path, 0, None)
    assert names(tmp_path) == [2]


def test_nothing_is_removed_before_the_new_one_is_complete(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    keep = keeper(tmp_path, trainer, keep_last=1)
    run(keep, {0: None})
    keep.save(1)
    assert names(tmp_path) == [0, 1]
    keep.settle(1, {})
    trainer.fail = True
    with pytest.raises(OSError, match="No space left"):
        keep.save(2)
    assert names(tmp_path) == [1]


def test_a_checkpoint_knows_the_metrics_of_its_step_before_the_step_has_ended(tmp_path: Path) -> None:
    keep, metrics = keeper(tmp_path), {"train/loss": 0.5, "train/grad_norm": float("nan")}
    keep.save(3, metrics)
    metrics["eval/heldout"] = 1.0
    kept = open_checkpoint(tmp_path).metrics
    assert kept["train/loss"] == 0.5 and math.isnan(kept["train/grad_norm"]) and len(kept) == 2


def test_a_step_that_saved_nothing_removes_nothing(tmp_path: Path) -> None:
    run(keeper(tmp_path), {0: None, 1: None})
    keeper(tmp_path, keep_last=1).settle(2, {"train/loss": 1.0})
    assert names(tmp_path) == [0, 1]


def test_leftovers_of_a_killed_run_are_removed_with_the_next_save(tmp_path: Path) -> None:
    for name in (".partial_rollout_000003", ".removed_rollout_000001"):
        (tmp_path / name / "trainer").mkdir(parents=True)
    keeper(tmp_path).save(4)
    assert [p.name for p in tmp_path.iterdir()] == ["rollout_000004"]


def test_a_metric_that_no_step_has_is_named(tmp_path: Path) -> None:
    keep = keeper(tmp_path, keep_last=1, keep_best="eval/held")
    keep.save(0)
    with pytest.raises(TrainingError, match=r"--keep-best-checkpoint eval/held is not among .*: eval/heldout"):
        keep.settle(0, {"eval/heldout": 0.5})
    keep.settle(1, {"train/loss": 0.5})  # evaluation was not due


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("eval/heldout", ("eval/heldout", True)),
        ("train/loss:min", ("train/loss", False)),
        ("eval/set:7:max", ("eval/set:7", True)),
        ("eval/set:7", ("eval/set:7", True)),
    ],
)
def test_the_direction_comes_after_the_metric(text: str, parsed: tuple[str, bool]) -> None:
    assert parse_best(text) == parsed


@pytest.mark.parametrize("text", ["", ":min", "loss", "accuracy:max"])
def test_what_names_no_metric_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="give METRIC, METRIC:max or METRIC:min"):
        parse_best(text)


def test_an_hf_export_is_whole_or_not_there(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    keep = keeper(tmp_path / "ck", trainer, hf_path=str(tmp_path / "hf" / "{rollout_id}"))
    keep.export_hf(3)
    keep.export_hf(3)
    assert sorted(p.name for p in (tmp_path / "hf" / "3").iterdir()) == ["config.json", "model.safetensors"]
    trainer.fail = True
    for rollout_id in (3, 4):
        with pytest.raises(OSError, match="No space left"):
            keep.export_hf(rollout_id)
    assert [p.name for p in (tmp_path / "hf").iterdir()] == ["3"]
    assert json.loads((tmp_path / "hf" / "3" / "config.json").read_text()) == {}


def test_a_folder_of_other_things_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds files but no HF checkpoint"):
        export_hf(FakeTrainer(), tmp_path)  # type: ignore[arg-type]
    assert (tmp_path / "notes.txt").read_text() == "mine"


class SlowTrainer(FakeTrainer):
    """Writes in the background: a save is done when the test says so, or when it is waited for."""

    step, is_written, problem = 0, False, ""

    def begin_save(self, path: Path) -> None:
        self._path, self._step, self.is_written = path, self.step, False

    def end_save(self, wait: bool) -> bool:
        if not (self.is_written or wait):
            return False
        if self.problem:
            raise TrainingError(self.problem)
        self._path.mkdir()
        (self._path / "weights").write_text(str(self._step))
        return True


class CountingSource(FakeSource):
    offset = 0

    def state(self) -> dict[str, Any]:
        return {"offset": self.offset}


def contents(folder: Path, rollout_id: int) -> tuple[str, int]:
    path = folder / f"rollout_{rollout_id:06d}"
    state = json.loads((path / "state.json").read_text())
    return (path / "trainer" / "weights").read_text(), state["data_source"]["offset"]


def slow_keeper(folder: Path, **more: Any) -> tuple[CheckpointKeeper, SlowTrainer, CountingSource]:
    trainer, source = SlowTrainer(), CountingSource()
    made: Any = CheckpointKeeper
    return made(trainer, source, StopRule(), folder=folder, settings={}, in_background=True, **more), trainer, source


def test_a_checkpoint_in_the_background_is_of_the_step_it_was_begun_in_and_newest_when_whole(tmp_path: Path) -> None:
    keep, trainer, source = slow_keeper(tmp_path, keep_last=1, keep_best="train/loss:min")
    for step in range(5):
        trainer.step, source.offset = step, 8 * step
        if step in (1, 4):
            keep.save(step)
        trainer.step, source.offset = -1, -1  # training and generation go on
        trainer.is_written = step >= 3
        keep.settle(step, {"train/loss": 10.0 + step})
        assert names(tmp_path) == {0: [], 1: [], 2: [], 3: [1], 4: [1, 4]}[step]
    assert contents(tmp_path, 1) == ("1", 8) and contents(tmp_path, 4) == ("4", 32)
    assert read_metrics(tmp_path / "rollout_000001") == {"train/loss": 11.0}, "the metrics are of its own step"
    keep.finish()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rollout_000001", "rollout_000004"]


def test_the_next_save_and_the_end_wait_for_the_one_under_way(tmp_path: Path) -> None:
    keep, _, _ = slow_keeper(tmp_path, keep_last=1)
    keep.save(0)
    keep.settle(0, {})
    keep.save(1)
    assert names(tmp_path) == [0]
    keep.finish()
    assert names(tmp_path) == [0, 1], "nothing is removed before the step of the new one has ended"
    keep.settle(1, {})
    assert names(tmp_path) == [1]
    keep.finish()


def test_what_goes_wrong_in_the_background_ends_the_next_step(tmp_path: Path) -> None:
    keep, trainer, _ = slow_keeper(tmp_path)
    keep.save(0)
    keep.settle(0, {})
    keep.save(1)
    trainer.problem = "rank 3: [Errno 28] No space left on device"
    keep.settle(1, {})
    trainer.is_written = True
    with pytest.raises(TrainingError, match=r"rank 3: .*No space left"):
        keep.settle(2, {})
    assert [p.name for p in tmp_path.iterdir()] == ["rollout_000000"]
    keep.settle(3, {})


@pytest.mark.parametrize(
    ("error", "waits"),
    [(DataError("a bad row"), True), (TrainingError("rank 0 died"), False), (KeyboardInterrupt(), False)],
)
def test_an_error_elsewhere_waits_for_the_checkpoint_and_one_of_the_trainer_or_ctrl_c_leaves_it(
    tmp_path: Path, error: BaseException, waits: bool
) -> None:
    keep, _, _ = slow_keeper(tmp_path)
    with pytest.raises(type(error)), keep:
        keep.save(0)
        raise error
    assert names(tmp_path) == ([0] if waits else [])
    remove_leftovers(tmp_path)
    assert len(list(tmp_path.iterdir())) == waits


def test_an_error_stays_itself_if_the_checkpoint_cannot_be_completed_either(tmp_path: Path) -> None:
    keep, trainer, _ = slow_keeper(tmp_path)
    trainer.problem = "rank 3: [Errno 28] No space left on device"
    with pytest.raises(DataError, match="a bad row") as caught, keep:
        keep.save(7)
        raise DataError("a bad row")
    assert "the checkpoint of rollout 7 could not be completed: rank 3" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"at": {1, 2}}, r"state\(\)\['at'\] is \{1, 2\} of type set"),
        ({"at": [0, {"n": b"x"}]}, r"state\(\)\['at'\]\[1\]\['n'\] is b'x' of type bytes"),
        ({"seen": {3: 1}}, r"state\(\)\['seen'\] has the key 3 of type int"),
        ([1], r"gave \[1\] of type list, but must give a dictionary"),
    ],
)
def test_a_source_with_a_state_that_is_no_json_is_named_before_the_first_step(
    tmp_path: Path, state: Any, said: str
) -> None:
    made: Any = CheckpointKeeper
    source = FakeSource()
    source.state = lambda: state  # type: ignore[method-assign]
    with pytest.raises(DataError, match=rf"data source .*test_keeper\.FakeSource: .*{said}"):
        made(FakeTrainer(), source, StopRule(), folder=tmp_path, settings={})
    made(FakeTrainer(), source, StopRule(), folder=None, settings={})  # nothing is kept


def test_a_state_that_is_no_json_later_leaves_no_checkpoint(tmp_path: Path) -> None:
    made: Any = CheckpointKeeper
    source = FakeSource()
    keep = made(FakeTrainer(), source, StopRule(), folder=tmp_path, settings={})
    source.state = lambda: {"at": object()}  # type: ignore[method-assign]
    with pytest.raises(DataError, match="of type object"):
        keep.save(0)
    assert list(tmp_path.iterdir()) == []
