"""The rollout stream on engines that sample a token when the test says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.bench import HOOKS, Bench
from tests.rollout.stepped_engines import WAIT_S, SteppedEngines, log_prob_of
from vime.data.journal import Journal
from vime.data.journaled import JournaledSource
from vime.errors import ConfigError, DataError, EngineError, VimeError
from vime.observability.metrics import check_names
from vime.protocols import GenerateRequest
from vime.rewards.pool import GraderPool
from vime.rollout.stage import RolloutStage
from vime.rollout.stale import StaleGroups
from vime.rollout.stream import RolloutStream, StreamLimits
from vime.types import Group, RolloutResult

BATCH = 2
RESUMABLE: dict[str, Any] = {"version": 1, "uses_finished": True}


class Run:
    """A stream, its engines and its data, between a loop and a trainer that are this test."""

    def __init__(
        self,
        tokenizer: Any,
        pool: GraderPool,
        engines: SteppedEngines | None = None,
        *,
        max_staleness: int = 1,
        max_generating: int = 3,
        in_flight: bool = True,
        action: str = "drop",
        num_rollout: int = 9,
        masks_all_but_last: bool = False,
        interval: int = 1,
        start: bool = True,
        journal: Journal | None = None,
        **rollout: Any,
    ) -> None:
        self.engines = engines or SteppedEngines()
        settings = {"rollout_batch_size": BATCH, "n_samples_per_prompt": 1} | rollout
        bench = Bench(tokenizer, pool, self.engines, **settings)  # type: ignore[arg-type]
        self.buffer = bench.source
        self.source = bench.source if journal is None else JournaledSource(bench.source, journal, **RESUMABLE)
        self.version, self.rollout_id = 1, 0
        self.pool = ThreadPoolExecutor(1)
        self.stream = RolloutStream(
            bench.context,
            RolloutStage(bench.context, self.source, {}),
            self.source,
            limits=StreamLimits(
                batch=BATCH,
                max_generating=max_generating,
                max_staleness=max_staleness,
                in_flight=in_flight,
                interval=interval,
            ),
            stale=StaleGroups(max_staleness, action, masks_all_but_last=masks_all_but_last),
            num_groups=num_rollout * BATCH,
        )
        if start:
            self.stream.start(0, 1)
            self.engines.settle()

    def take(self) -> RolloutResult:
        """What is there already, or comes by itself."""
        result = self.taking().result(WAIT_S)
        self.engines.settle()
        return result

    def taking(self) -> Future[RolloutResult]:
        """As the loop's thread does, which waits."""
        rollout_id, self.rollout_id = self.rollout_id, self.rollout_id + 1
        return self.pool.submit(self.stream.take, rollout_id)

    def sync(self) -> None:
        """The engines get the weights of the next version."""
        self.pool.submit(self.stream.pause).result(WAIT_S)
        assert not self.engines.running, "weights would change under a request"
        self.version += 1
        self.engines.version = self.version
        self.stream.resume(self.version)
        self.engines.settle()

    @property
    def under_way(self) -> list[int]:
        """The groups that engines work on."""
        return sorted(int(name.split("-")[1].split("+")[0]) for name in self.engines.running)


@contextmanager
def running(tokenizer: Any, pool: GraderPool, *args: Any, **settings: Any) -> Iterator[Run]:
    run = Run(tokenizer, pool, *args, **settings)
    with run.stream:
        yield run
    run.pool.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name == "rollout-stream"]
    assert run.engines.num_closed == 1


def ids(result: RolloutResult) -> list[int]:
    return [group.group_id for group in result.groups]


def spans(group: Group) -> list[list[tuple[int, int, int]]]:
    return [[(span.version, span.start, span.end) for span in s.weight_versions] for s in group.samples]


def test_groups_are_begun_while_both_bounds_leave_room(tokenizer: Any, pool: GraderPool) -> None:
    with running(tokenizer, pool) as run:
        assert run.under_way == [0, 1, 2], "no more at a time"
        run.engines.step(2)
        assert run.under_way == [3], "4 are of version 1 and not older than 1 when the second rollout is trained on"
        run.engines.step(2)
        assert run.under_way == [] and len(run.engines.requests) == 4, "engines wait for the trainer"
        assert ids(run.take()) == [0, 1]
        assert run.under_way == [], "a further one of version 1 would be 2 versions old"
        run.sync()
        assert run.under_way == [4, 5]
        assert ids(run.take()) == [2, 3]
        assert run.engines.max_running == 3


def test_no_more_rollouts_lie_finished_than_a_slower_trainer_needs(tokenizer: Any, pool: GraderPool) -> None:
    with running(tokenizer, pool, max_staleness=3, max_generating=8) as run:

        def trained_slowly() -> tuple[int, float]:
            """The age of a rollout's oldest token, and the bound then."""
            result = run.take()
            age = max(
                run.version - span[0] for group in result.groups for of_sample in spans(group) for span in of_sample
            )
            run.engines.step(2)
            run.sync()
            return age, result.metrics["stream/versions_ahead"]

        assert len(run.under_way) == 8
        run.engines.step(2)
        assert [trained_slowly() for _ in range(6)] == [(0, 2), (1, 1), (2, 1), (3, 1), (1, 1), (1, 1)]
        run.take()
        assert len(run.under_way) == 2
        taking, end = run.taking(), time.monotonic() + WAIT_S
        while len(run.under_way) < 4:  # a trainer that waits has more of them begun
            assert time.monotonic() < end, run.under_way
            run.engines.settle()
        run.engines.step(2)
        assert taking.result(WAIT_S).metrics["stream/versions_ahead"] == 2


def test_a_slower_trainer_does_not_wait_where_engines_keep_their_weights_for_two_rollouts(
    tokenizer: Any, pool: GraderPool
) -> None:
    with running(tokenizer, pool, max_staleness=4, max_generating=8, interval=2, num_rollout=20) as run:
        run.engines.step(2)
        bounds = []
        for rollout_id in range(10):
            bounds.append(run.take().metrics["stream/versions_ahead"])  # is there: nothing is generated meanwhile
            run.engines.step(2)
            if rollout_id % 2:
                run.version += 1  # of the rollout before, whose weights engines do not get
                run.sync()
        assert bounds[-4:] == [2] * 4


def test_the_trainer_waits_for_a_whole_rollout(tokenizer: Any, pool: GraderPool) -> None:
    lengths = SteppedEngines(lambda request: 2 if request.request_id == "stream-0" else 4)
    with running(tokenizer, pool, lengths) as run:
        taking = run.taking()
        run.engines.step(2)
        assert not taking.done()
        run.engines.step(2)
        assert ids(taking.result(WAIT_S)) == [0, 1]


def test_a_rollout_has_the_metrics_of_its_time(tokenizer: Any, pool: GraderPool) -> None:
    with running(tokenizer, pool) as run:
        run.engines.step(2)
        result = run.take()
        check_names(result.metrics)
        assert result.metrics["rollout/num_groups"] == 3
        assert result.metrics["stream/generating_groups/max"] == 3 == result.metrics["stream/finished_groups/max"]
        assert 0 < result.metrics["stream/generating_groups/mean"] < 3
        assert result.metrics["stream/scoring_groups/max"] <= 3
        assert result.metrics["stream/dropped_stale_groups"] == 0 == result.metrics["stream/continued_samples"]
        names = [span["name"] for span in result.groups[0].samples[0].trace]
        assert names == ["waiting", "generate", "reward", "queued"]
        run.engines.step(2)
        run.sync()
        assert run.take().metrics["rollout/num_groups"] == 1


def test_tokens_are_of_the_version_that_their_span_names(tokenizer: Any, pool: GraderPool) -> None:
    with running(tokenizer, pool, SteppedEngines(lambda r: 8 - len(r.token_ids)), n_samples_per_prompt=2) as run:
        run.engines.step(2)
        run.sync()
        run.engines.step(1)
        run.sync()
        run.engines.step(9)
        result = run.take()
        assert result.metrics["stream/continued_samples"] >= 8
        for group in result.groups:
            assert spans(group) == [[(1, 0, 2), (2, 2, 3), (3, 3, 6)]] * 2
            for sample in group.samples:
                for span in sample.weight_versions:
                    for place in range(span.start, span.end):
                        assert sample.rollout_log_probs[place] == log_prob_of(span.version, 2 + place)


def test_between_samples_a_sync_waits_for_those_under_way_and_begins_no_others(
    tokenizer: Any, pool: GraderPool
) -> None:
    lengths = SteppedEngines(lambda request: 2 if request.request_id == "stream-0" else 4)
    with running(tokenizer, pool, lengths, in_flight=False) as run:
        run.engines.step(1)
        pausing = run.pool.submit(run.stream.pause)
        run.engines.settle()
        run.engines.step(1)
        assert run.under_way == [1, 2] and not pausing.done(), "group 0 has ended, and group 3 waits"
        run.engines.step(2)
        pausing.result(WAIT_S)
        assert run.under_way == []
        run.engines.version = 2
        run.stream.resume(2)
        run.engines.settle()
        assert 3 in run.under_way
        run.engines.step(4)
        assert [spans(g) for g in [*run.take().groups, *run.take().groups]] == [
            *([[(1, 0, 2)]], [[(1, 0, 4)]], [[(1, 0, 4)]], [[(2, 0, 4)]])
        ]


def slow_first(request: GenerateRequest) -> int:
    """Group 0 takes 6 tokens over all parts, as the prompt has 2; the others take 1."""
    return 8 - len(request.token_ids) if request.request_id.startswith("stream-0") else 1


def grown_old(run: Run) -> None:
    """Group 0 has three versions and waits with others, and the trainer will have version 3 for the next rollout."""
    for _ in range(2):
        run.engines.step(1)
        run.take()
        run.sync()
    run.engines.step(9)


@pytest.mark.parametrize("action", ["drop", "mask", "correct"])
def test_what_has_grown_too_old_is_dropped_masked_or_kept(tokenizer: Any, pool: GraderPool, action: str) -> None:
    with running(tokenizer, pool, SteppedEngines(slow_first), action=action) as run:
        grown_old(run)
        result = run.take()
        check_names(result.metrics)
        if action == "drop":
            assert 0 not in ids(result) and result.metrics["stream/dropped_stale_groups"] == 1
            asked = [r.token_ids for r in run.engines.requests if r.request_id == "stream-0"]
            assert len(asked) == 2 and asked[0] == asked[1], "its prompt is generated anew"
            return
        assert result.metrics["stream/dropped_stale_groups"] == 0
        (group,) = [group for group in result.groups if group.group_id == 0]
        assert spans(group) == [[(1, 0, 1), (2, 1, 2), (3, 2, 6)]]
        masked = 1 if action == "mask" else 0
        assert group.samples[0].loss_mask == (0,) * masked + (1,) * (6 - masked)
        assert result.metrics["stream/masked_stale_tokens"] == masked


def test_all_but_the_newest_version_may_be_masked(tokenizer: Any, pool: GraderPool) -> None:
    run = Run(tokenizer, pool, SteppedEngines(slow_first), action="correct", masks_all_but_last=True)
    with run.stream:
        grown_old(run)
        (group,) = [group for group in run.take().groups if group.group_id == 0]
        assert group.samples[0].loss_mask == (0, 0, 1, 1, 1, 1)


def test_a_resume_generates_what_was_under_way_and_uses_what_was_finished(
    tokenizer: Any, pool: GraderPool, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    with running(tokenizer, pool, journal=journal) as run:
        run.engines.step(2)
        taken = run.take()
        run.engines.step(1)
        run.source.trained(0, taken.groups)
        state = run.source.state()
    journal.close()
    journal = Journal(tmp_path / "journal.sqlite")
    resumed = Run(tokenizer, pool, journal=journal, start=False)
    resumed.source.restore(state)
    with resumed.stream:
        resumed.stream.start(1, 1)
        resumed.engines.settle()
        assert ids(taken) == [0, 1] and resumed.under_way == [3, 4, 5], "2 was finished, and 3 under way"
        resumed.engines.step(2)
        result = resumed.take()
        assert ids(result) == [2, 3] and result.groups[0].samples[0].response_length == 2
    journal.close()


def test_what_is_under_way_at_the_end_goes_back(tokenizer: Any, pool: GraderPool) -> None:
    with running(tokenizer, pool) as run:
        run.engines.step(1)
        run.stream.stop()
        assert not run.engines.running
        assert [g.group_id for g in run.buffer.get_groups(4)] == [0, 1, 2, 3]
        run.stream.pause()
        run.stream.resume(2)
        assert not run.engines.running, "nothing is begun any more"


def test_partial_rollout_keeps_the_tokens_of_what_is_under_way_at_the_end(tokenizer: Any, pool: GraderPool) -> None:
    with running(tokenizer, pool, partial_rollout=True, over_sampling_batch_size=4) as run:
        run.engines.step(1)
        run.stream.stop()
        assert [g.samples[0].response_length for g in run.buffer.get_groups(4)] == [1, 1, 1, 0]


def test_no_more_is_begun_than_the_run_needs(tokenizer: Any, pool: GraderPool) -> None:
    with running(tokenizer, pool, num_rollout=2, max_staleness=5, max_generating=99) as run:
        assert run.under_way == [0, 1, 2, 3]
        run.engines.step(2)
        run.take()
        run.sync()
        assert ids(run.take()) == [2, 3] and len(run.engines.requests) == 4


def test_dropped_groups_are_replaced(tokenizer: Any, pool: GraderPool) -> None:
    with running(tokenizer, pool, max_staleness=0, dynamic_sampling_filter_path=f"{HOOKS}.keep_odd") as run:
        run.engines.step(6)
        result = run.take()
        assert ids(result) == [1, 3]
        assert result.metrics["rollout/dynamic_filter/drop_filtered"] == 2


def test_a_failure_of_generation_is_raised_to_who_takes(tokenizer: Any, pool: GraderPool) -> None:
    class Dying(SteppedEngines):
        async def generate(self, request: GenerateRequest) -> Any:
            raise EngineError("engine 0 is gone") if self.requests else await super().generate(request)

    run = Run(tokenizer, pool, Dying(), start=False)
    with run.stream, pytest.raises(EngineError, match="engine 0 is gone"):
        run.stream.start(0, 1)
        run.take()


def test_a_trainable_token_of_no_known_version_ends_the_run(tokenizer: Any, pool: GraderPool) -> None:
    run = Run(tokenizer, pool, custom_generate_function_path=f"{HOOKS}.without_versions", start=False)
    with run.stream, pytest.raises(DataError, match=r"version=completion\.weight_versions"):
        run.stream.start(0, 1)
        taking = run.taking()
        run.engines.step(2)
        taking.result(WAIT_S)


def test_a_custom_generate_function_goes_on_over_a_sync_without_knowing(tokenizer: Any, pool: GraderPool) -> None:
    path = f"{HOOKS}.two_turns"
    engines = SteppedEngines(lambda r: 2)
    with running(tokenizer, pool, engines, custom_generate_function_path=path, rollout_max_response_len=3) as run:
        run.engines.step(1)
        run.sync()
        run.engines.step(9)
        sample = run.take().groups[0].samples[0]
        assert sample.loss_mask.count(0) == 1, "the tool's token"
        assert {span.version for span in sample.weight_versions} == {1, 2}


@pytest.mark.parametrize("limit", [None, 5.0])
def test_between_samples_a_function_that_a_row_names_has_a_limit(
    tokenizer: Any, pool: GraderPool, limit: float | None
) -> None:
    row = {"generate_function_path": f"{HOOKS}.two_turns"}
    settings: dict[str, Any] = {"in_flight": False, "metadata": row, "custom_generate_timeout_s": limit}
    run = Run(tokenizer, pool, start=False, **settings)
    with run.stream:
        run.stream.start(0, 1)
        if limit is None:
            with pytest.raises(ConfigError, match=r"group 0: its row names .*--custom-generate-timeout-s"):
                run.take()
        else:
            run.engines.settle()
            assert run.under_way


def test_an_unknown_action_is_refused() -> None:
    with pytest.raises(ValueError, match="forget"):
        StaleGroups(1, "forget")


def test_errors_of_all_kinds_are_vimes_own(tokenizer: Any, pool: GraderPool) -> None:
    run = Run(tokenizer, pool, dynamic_sampling_filter_path=f"{HOOKS}.filter_that_raises", start=False)
    with run.stream, pytest.raises(VimeError):
        run.stream.start(0, 1)
        taking = run.taking()
        run.engines.step(2)
        taking.result(WAIT_S)


def test_what_ended_the_run_is_not_hidden_by_an_end_that_fails(
    tokenizer: Any, pool: GraderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails() -> None:
        raise EngineError("the connections do not close")

    monkeypatch.setattr(SteppedEngines, "aclose", lambda self: fails())
    with pytest.raises(ZeroDivisionError) as ended, Run(tokenizer, pool).stream:
        raise ZeroDivisionError
    assert "the connections do not close" in ended.value.__notes__[0]
    assert not [thread for thread in threading.enumerate() if thread.name == "rollout-stream"]
    with pytest.raises(EngineError, match="do not close"), Run(tokenizer, pool).stream:
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "rollout-stream"]
