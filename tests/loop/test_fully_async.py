"""The fully asynchronous loop on fakes of its protocols, with the real stream, data buffer and checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes import char_tokenizer
from tests.loop.world import Notes, recording, rows_of
from tests.rollout.bench import Bench
from vime.errors import EngineError, TrainingError
from vime.loop.cadence import Cadence, StopRule
from vime.loop.checkpoint import find_checkpoints
from vime.loop.fully_async import run_fully_async
from vime.loop.sync import run_sync
from vime.protocols import Completion, GenerateRequest
from vime.rewards.pool import GraderPool
from vime.rollout.stage import RolloutStage
from vime.rollout.stale import StaleGroups
from vime.rollout.stream import RolloutStream, StreamLimits
from vime.types import Group, VersionSpan

WAIT_S = 240
BATCH = 2


class World(Notes):
    """Engines, trainer and publisher at once. Engines answer at once by the version they have.

    Args: max_staleness, in_flight: of the stream.
    """

    def __init__(
        self, folder: Path, *, max_staleness: int = 1, in_flight: bool = True, stop: StopRule | None = None
    ) -> None:
        self.pool = GraderPool()
        self.bench = Bench(
            char_tokenizer(),
            self.pool,
            self,
            rollout_batch_size=BATCH,
            n_samples_per_prompt=1,  # type: ignore[arg-type]
        )
        super().__init__(folder, self.bench.source, stop)
        self.max_staleness, self.in_flight = max_staleness, in_flight
        self.ages: list[list[int]] = []
        self.before_answer: Callable[[GenerateRequest], None] = lambda request: None
        self.asked = threading.Event()

    # Engines

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self.num_running += 1
        try:
            self.before_answer(request)
            self.asked.set()
            span = (VersionSpan(self.version, 0, 1),)
            return [Completion(token_ids=(5,), log_probs=(-1.0,), finish_reason="stop", weight_versions=span)]
        finally:
            self.num_running -= 1

    async def abort(self, request_ids: Any) -> None:
        pass

    async def aclose(self) -> None:
        pass

    # Trainer

    def make_batch(self, rollout_id: int, groups: list[Group]) -> Any:
        ages = [rollout_id + 1 - span.version for g in groups for s in g.samples for span in s.weight_versions]
        ids = [g.group_id for g in groups]
        return SimpleNamespace(rollout_id=rollout_id, prompts=ids, ages=ages), {}

    def train(self, batch: Any) -> dict[str, float]:
        metrics = super().train(batch)
        self.ages.append(batch.ages)
        return metrics


def run(
    world: World, folder: Path, num_rollout: int, *, start: int = 0, eval_before: bool = False, **cadence: Any
) -> list[dict[str, Any]]:
    stage = RolloutStage(world.bench.context, world.source, {})
    stage.evaluate = world.evaluate  # type: ignore[method-assign]
    stages = world.stages(stage, folder / "checkpoints" if cadence.get("saves") else None)
    stream = RolloutStream(
        world.bench.context,
        stage,
        world.source,
        limits=StreamLimits(
            batch=BATCH, max_generating=9, max_staleness=world.max_staleness, in_flight=world.in_flight
        ),
        stale=StaleGroups(world.max_staleness, "drop"),
        num_groups=(num_rollout - start) * BATCH,
    )
    options = {"start": start, "eval_before": eval_before, "stop": world.stop}
    try:
        with recording(folder, num_rollout) as recorder:
            run_fully_async(stages, Cadence(num_rollout, **cadence), recorder, stream=stream, **options)
    finally:
        world.pool.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "rollout-stream"]
    return rows_of(folder)


@pytest.mark.parametrize("in_flight", [True, False])
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_every_rollout_is_trained_on_once_and_none_is_older_than_allowed(
    tmp_path: Path, max_staleness: int, in_flight: bool
) -> None:
    world = World(tmp_path, max_staleness=max_staleness, in_flight=in_flight)
    rows = run(world, tmp_path, 6, eval_before=True, eval_interval=3, evaluates=True, saves=True, save_interval=2)
    assert world.calls == [
        *("publish v1", "evaluate -1 at v1"),
        *("train 0", "publish v2", "train 1", "save 1", "publish v3", "train 2", "publish v4", "evaluate 2 at v4"),
        *("train 3", "save 3", "publish v5", "train 4", "publish v6", "train 5", "save 5", "publish v7"),
        "evaluate 5 at v7",
    ]
    assert sorted(i for ids in world.trained for i in ids) == list(range(6 * BATCH))
    assert all(0 <= age <= max_staleness for ages in world.ages for age in ages)
    assert [row["staleness/max"] for row in rows[1:]] == [max(ages) for ages in world.ages]
    if max_staleness == 0:
        assert world.trained == [[2 * r, 2 * r + 1] for r in range(6)]


def test_engines_keep_their_weights_for_the_interval(tmp_path: Path) -> None:
    world = World(tmp_path, max_staleness=2)
    run(world, tmp_path, 6, publish_interval=3)
    assert [call for call in world.calls if call.startswith("publish")] == ["publish v1", "publish v4", "publish v7"]
    assert max(age for ages in world.ages for age in ages) <= 2


def test_from_any_checkpoint_no_prompt_is_skipped_or_trained_on_twice(tmp_path: Path) -> None:
    whole = World(tmp_path, max_staleness=2)
    run(whole, tmp_path, 5, saves=True, save_interval=1)
    assert len(find_checkpoints(tmp_path / "checkpoints")) == 5
    for rollout_id in range(4):
        rest = World(tmp_path / f"rest_{rollout_id}", max_staleness=2)
        rest.resume(tmp_path, rollout_id)
        run(rest, tmp_path / f"rest_{rollout_id}", 5, start=rollout_id + 1)
        before = [i for ids in whole.trained[: rollout_id + 1] for i in ids]
        after = [i for ids in rest.trained for i in ids]
        assert sorted(before + after) == list(range(5 * BATCH)), rollout_id


def test_a_synchronous_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    world = World(tmp_path, max_staleness=2)
    run(world, tmp_path, 3, saves=True, save_interval=1)
    rest = World(tmp_path / "rest")
    rest.resume(tmp_path, 1)
    stage = RolloutStage(rest.bench.context, rest.source, {})
    with recording(tmp_path / "rest", 3) as recorder:
        run_sync(rest.stages(stage, None), Cadence(3), recorder, start=2, eval_before=False, stop=rest.stop)
    rest.pool.close()
    before = [i for ids in world.trained[:2] for i in ids]
    assert sorted(before + rest.trained[0]) == list(range(3 * BATCH))


def test_the_rule_ends_the_run_and_what_was_under_way_comes_next(tmp_path: Path) -> None:
    world = World(tmp_path, stop=StopRule("train/step", above=2.0, window=1))
    run(world, tmp_path, 9, saves=True, evaluates=True)
    assert world.calls[-4:] == ["train 2", "save 2", "publish v4", "evaluate 2 at v4"]
    rest = World(tmp_path / "rest")
    rest.resume(tmp_path, 2)
    again = sorted(group.group_id for group in rest.source.get_groups(4))
    trained = [i for ids in world.trained for i in ids]
    assert sorted(trained + again) == list(range(10))
    stopped = World(tmp_path / "stopped", stop=world.stop)
    run(stopped, tmp_path / "stopped", 9, start=3)
    assert stopped.calls == [] and not stopped.asked.is_set()
    rest.pool.close()


def test_a_failing_generation_ends_the_run_and_what_was_trained_is_not_lost(tmp_path: Path) -> None:
    world = World(tmp_path)

    def fail(request: GenerateRequest) -> None:
        if request.request_id.startswith("stream-") and int(request.request_id.split("-")[1]) >= 6:
            raise EngineError("engine 0 is gone")

    world.before_answer = fail
    with pytest.raises(EngineError, match="engine 0 is gone"):
        run(world, tmp_path, 9, saves=True, save_interval=1)
    assert "save 1" in world.calls
    assert all(i < 6 for ids in world.trained for i in ids)


@pytest.mark.parametrize("error", [TrainingError("rank 0 died"), KeyboardInterrupt()])
def test_a_failing_training_ends_the_generation_beside_it(tmp_path: Path, error: BaseException) -> None:
    world = World(tmp_path)

    def fail(batch: Any) -> dict[str, float]:
        assert world.asked.wait(WAIT_S)
        raise error

    world.train = fail  # type: ignore[method-assign]
    with pytest.raises(type(error)) as caught:
        run(world, tmp_path, 9)
    assert caught.value is error
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_failing_weight_sync_ends_the_run_with_requests_that_wait_for_it(tmp_path: Path) -> None:
    world = World(tmp_path, max_staleness=3)
    publish = world.publish

    def fail(version: int) -> int:
        if version == 3:
            raise EngineError("engine 0 did not commit")
        return publish(version)

    world.publish = fail  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="did not commit"):
        run(world, tmp_path, 9)


def test_stages_add_up_to_the_step(tmp_path: Path) -> None:
    for row in run(World(tmp_path), tmp_path, 3):
        stages = [v for k, v in row.items() if k.startswith("perf/") and k.endswith("_time") and k != "perf/step_time"]
        assert sum(stages) == pytest.approx(row["perf/step_time"], abs=1e-9)
        assert {"perf/rollout_wait_time", "perf/train_time"} <= set(row)
