"""The overlapped loop on fakes of its protocols, with the real data buffer and real checkpoints."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.loop.world import Notes, recording, rows_of
from vime.data.buffer import DataBuffer
from vime.data.prompt_set import Prompt
from vime.errors import EngineError, TrainingError
from vime.loop import ahead
from vime.loop.cadence import Cadence, StopRule
from vime.loop.checkpoint import find_checkpoints
from vime.loop.overlapped import run_overlapped
from vime.loop.sync import run_sync
from vime.types import Group, RolloutResult

WAIT_S = 120  # for what comes at once, or never where something is wrong
BATCH, OVER_SAMPLED = 3, 5


class World(Notes):
    """All stages but the checkpoints at once. A rollout takes 5 prompts, keeps 3 and puts 2 back.

    Args:
        beside: the trainer does not end before the next rollout has its prompts, which a loop that generates and trains
            in turns would never come to.
    """

    def __init__(self, folder: Path, *, beside: bool, stop: StopRule | None = None) -> None:
        source = DataBuffer(
            [Prompt(prompt=str(i), tokens=(i + 1,), label=i) for i in range(97)],
            n_samples_per_prompt=1,
            shuffle=True,
            seed=5,
        )
        super().__init__(folder, source, stop)
        self.beside, self.num_rollout = beside, 0
        self.took: dict[int, threading.Event] = defaultdict(threading.Event)
        self.before_end: Callable[[int], None] = lambda rollout_id: None
        self.off = threading.Event()

    # In its own thread

    def generate(self, rollout_id: int) -> RolloutResult:
        version, self.num_running = self.version, 1
        try:
            groups = self.source.get_groups(OVER_SAMPLED)
            self.took[rollout_id].set()
            self.before_end(rollout_id)
            for sample in (group.samples[0] for group in groups[:BATCH]):
                sample.append_response([3], [-1.0], version=version)
            self.source.put_back(groups[BATCH:])
            assert self.version == version, "weights came in the middle of a rollout"
            return RolloutResult(groups[:BATCH], {"rollout/raw_reward": rollout_id / 10})
        finally:
            self.num_running = 0

    def call_off(self) -> None:
        self.off.set()

    # In the loop's

    def make_batch(self, rollout_id: int, groups: list[Group]) -> Any:
        return SimpleNamespace(rollout_id=rollout_id, prompts=[g.samples[0].label for g in groups]), {}

    def train(self, batch: Any) -> dict[str, float]:
        if self.beside and batch.rollout_id + 1 < self.num_rollout:
            assert self.took[batch.rollout_id + 1].wait(WAIT_S), "the next rollout did not begin beside the training"
        return super().train(batch)

    def evaluate(self, rollout_id: int) -> RolloutResult:
        assert not self.num_running
        return super().evaluate(rollout_id)


def run(
    world: World,
    folder: Path,
    num_rollout: int,
    *,
    start: int = 0,
    loop: Callable[..., int] = run_overlapped,
    eval_before: bool = False,
    **cadence: Any,
) -> list[dict[str, Any]]:
    world.num_rollout = num_rollout
    stages = world.stages(world, folder / "checkpoints" if cadence.get("saves") else None)
    with recording(folder, num_rollout) as recorder:
        loop(stages, Cadence(num_rollout, **cadence), recorder, start=start, eval_before=eval_before, stop=world.stop)
    return rows_of(folder)


def resumed(folder: Path, rest: Path, rollout_id: int, *, beside: bool = True) -> World:
    """Args: folder: of the run before. rest: of the one that goes on."""
    world = World(rest, beside=beside)
    world.resume(folder, rollout_id)
    return world


def rollout_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if re.fullmatch(r"rollout-\d+", thread.name)]


def test_a_rollout_is_generated_beside_the_training_of_the_one_before_and_the_sync_waits_for_it(tmp_path: Path) -> None:
    world = World(tmp_path, beside=True)
    rows = run(world, tmp_path, 4, eval_before=True, eval_interval=2, evaluates=True, saves=True, save_interval=1)
    assert world.calls == [
        *("publish v1", "evaluate -1 at v1"),
        *("train 0", "save 0", "publish v2"),
        *("train 1", "save 1", "publish v3", "evaluate 1 at v3"),
        *("train 2", "save 2", "publish v4"),
        *("train 3", "save 3", "publish v5", "evaluate 3 at v5"),
    ]
    steps = rows[1:]
    assert [row["train/policy_version"] for row in steps] == [1, 1, 2, 3]
    assert [row["staleness/max"] for row in steps] == [0, 1, 1, 1]
    assert rollout_threads() == []


def test_the_samples_trained_on_are_those_of_the_synchronous_loop(tmp_path: Path) -> None:
    overlapped, sync = World(tmp_path / "overlapped", beside=True), World(tmp_path / "sync", beside=False)
    run(overlapped, tmp_path / "overlapped", 8)
    run(sync, tmp_path / "sync", 8, loop=run_sync)
    assert overlapped.trained == sync.trained and len(sync.trained) == 8


def test_from_any_checkpoint_no_prompt_is_skipped_or_trained_on_twice(tmp_path: Path) -> None:
    whole = World(tmp_path, beside=True)
    run(whole, tmp_path, 6, saves=True, save_interval=1)
    assert len(find_checkpoints(tmp_path / "checkpoints")) == 6
    for rollout_id in range(5):
        for loop in (run_overlapped, run_sync):
            folder = tmp_path / f"{loop.__name__}_{rollout_id}"
            rest = resumed(tmp_path, folder, rollout_id, beside=loop is run_overlapped)
            run(rest, folder, 6, start=rollout_id + 1, loop=loop)
            assert whole.trained[: rollout_id + 1] + rest.trained == whole.trained, (rollout_id, loop)


def test_a_rollout_under_way_when_the_rule_ends_the_run_is_called_off_and_comes_next(tmp_path: Path) -> None:
    rule = StopRule("rollout/raw_reward", above=0.2)  # after rollout 2
    world = World(tmp_path, beside=True, stop=rule)

    def until_called_off(rollout_id: int) -> None:
        if rollout_id == 3:
            assert world.off.wait(WAIT_S)
            raise asyncio.CancelledError

    world.before_end = until_called_off
    run(world, tmp_path, 9, saves=True, evaluates=True)
    assert world.calls[-4:] == ["train 2", "save 2", "publish v4", "evaluate 2 at v4"]
    assert world.took[3].is_set() and rollout_threads() == []
    without = World(tmp_path / "without", beside=True)
    run(without, tmp_path / "without", 5)
    rest = resumed(tmp_path, tmp_path / "rest", 2)
    run(rest, tmp_path / "rest", 5, start=3)
    assert world.trained + rest.trained == without.trained


def test_engines_keep_their_weights_for_the_interval(tmp_path: Path) -> None:
    world = World(tmp_path, beside=True)
    rows = run(world, tmp_path, 6, publish_interval=2, eval_interval=4, evaluates=True)
    assert [call for call in world.calls if not call.startswith("train")] == [
        *("publish v1", "publish v3", "publish v5", "evaluate 3 at v5", "publish v7", "evaluate 5 at v7")
    ]
    assert [row["train/policy_version"] for row in rows] == [1, 1, 1, 3, 3, 5]
    assert [row["staleness/max"] for row in rows] == [0, 1, 2, 1, 2, 1]


def test_times_add_up_and_say_who_waited_for_whom(tmp_path: Path) -> None:
    for row in run(World(tmp_path, beside=True), tmp_path, 3, evaluates=True):
        stages = [v for k, v in row.items() if k.startswith("perf/") and k.endswith("_time") and k != "perf/step_time"]
        assert sum(stages) == pytest.approx(row["perf/step_time"], abs=1e-9)
        assert {"perf/rollout_wait_time", "perf/train_time"} <= set(row) and "perf/rollout_time" not in row
        assert row["perf/rollout_s"] > 0 < row["perf/rollout_ready_s"]


def test_a_failing_generation_ends_the_run_after_the_training_beside_it(tmp_path: Path) -> None:
    world = World(tmp_path, beside=True)

    def fail(rollout_id: int) -> None:
        if rollout_id == 2:
            raise EngineError("engine 0 is gone")

    world.before_end = fail
    with pytest.raises(EngineError, match="engine 0 is gone"):
        run(world, tmp_path, 9, saves=True, save_interval=1)
    assert world.calls[-2:] == ["train 1", "save 1"], "what was trained is not lost"
    world.before_end = lambda rollout_id: None
    rest = resumed(tmp_path, tmp_path / "rest", 1)
    run(rest, tmp_path / "rest", 4, start=2)
    without = World(tmp_path / "without", beside=True)
    run(without, tmp_path / "without", 4)
    assert world.trained + rest.trained == without.trained
    assert rollout_threads() == []


@pytest.mark.parametrize("error", [TrainingError("rank 0 died"), KeyboardInterrupt()])
def test_a_failing_training_calls_off_the_generation_beside_it(tmp_path: Path, error: BaseException) -> None:
    world = World(tmp_path, beside=True)

    def until_called_off(rollout_id: int) -> None:
        if rollout_id == 1:
            assert world.off.wait(WAIT_S)
            raise asyncio.CancelledError

    def fail(batch: Any) -> dict[str, float]:
        assert world.took[1].wait(WAIT_S)
        raise error

    world.before_end, world.train = until_called_off, fail  # type: ignore[method-assign]
    with pytest.raises(type(error)) as caught:
        run(world, tmp_path, 9)
    assert caught.value is error and rollout_threads() == []
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_rollout_that_cannot_be_ended_does_not_hold_up_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ahead, "_PATIENCE_S", 0.01)
    world, end = World(tmp_path, beside=True), threading.Event()
    world.before_end = lambda rollout_id: None if rollout_id == 0 else assert_set(end)
    world.fail_training_at = 0
    with pytest.raises(TrainingError, match="rank 0 died"):
        run(world, tmp_path, 9)
    assert "rollout-1 does not end; it is left behind" in caplog.text
    (thread,) = rollout_threads()
    assert thread.daemon, "the program ends without it"
    end.set()
    thread.join(WAIT_S)


def assert_set(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


def test_a_run_that_its_rule_has_stopped_generates_nothing_more(tmp_path: Path) -> None:
    stop = StopRule("rollout/raw_reward", above=0.0)
    stop.reached({"rollout/raw_reward": 0.5})
    world = World(tmp_path, beside=True, stop=stop)
    run(world, tmp_path, 9, start=2)
    assert world.calls == [] and not world.took


def test_the_last_rollout_has_none_beside_it(tmp_path: Path) -> None:
    world = World(tmp_path, beside=True)
    run(world, tmp_path, 3)
    assert sorted(world.took) == [0, 1, 2]
