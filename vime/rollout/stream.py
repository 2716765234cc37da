"""Groups without an end: engines are kept busy, whatever the trainer does, within a bound on the groups' age.

    source ──▶ generating (at most --max-groups-in-flight) ──▶ being scored ──▶ finished ──▶ take
       ▲                 └────────────── as many as --max-staleness allows ──────┘
       └── too old, aborted

A new group is begun when both bounds leave room for it, which changes when a group has been generated, finished or
taken, the trainer waits, or the engines got new weights: nobody looks at a clock. The bound on age is tighter than
--max-staleness while whole rollouts would lie finished (pace.py). The work is done in an event loop of its own thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass, replace
from types import TracebackType

from vime.data.buffer import one_sample_each, pending_again
from vime.data.source import take_groups
from vime.data.versions import num_without_version, trainable_versions
from vime.errors import ConfigError, DataError
from vime.observability.trace import Span, add_span
from vime.protocols import DataSource, RolloutContext
from vime.rollout.continuing import ContinuingEngines
from vime.rollout.gate import Gate, Pulse
from vime.rollout.generate import group_seed, rollout_sampling
from vime.rollout.kept import Kept
from vime.rollout.loop_thread import LoopThread
from vime.rollout.pace import Pace
from vime.rollout.runner import GroupRunner, Outcome
from vime.rollout.stage import Begin, RolloutStage
from vime.rollout.stale import StaleGroups
from vime.rollout.stream_gauges import StreamGauges
from vime.rollout.watch import LoopWatch
from vime.types import Group, Metrics, PolicyVersion, RolloutResult

logger = logging.getLogger(__name__)

_PATIENCE_S = 30.0  # at the end; a user's function that cannot be stopped is left behind then


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """What bounds the stream."""

    batch: int
    """Groups of a rollout (--rollout-batch-size)."""
    max_generating: int
    """Groups under generation at a time."""
    max_staleness: int
    """Versions that a group's oldest trainable token may be behind the trainer."""
    in_flight: bool
    """Weights change while samples are generated, not between them."""
    interval: int = 1
    """Rollouts between two weight syncs (--update-weights-interval)."""


@dataclass(slots=True)
class _Finished:
    """A group that waits for the trainer."""

    group: Group
    fresh: Group
    """As it was before its generation."""
    oldest: PolicyVersion
    """Of its trainable tokens."""
    since_s: float


class RolloutStream:
    """The stream of one run; satisfies `vime.loop.fully_async.Stream`, which says in what order it is called.

    As a context manager it ends everything under way.

    Args:
        context: of the run.
        stage: what a rollout is after it has been generated.
        source: of the prompts; called from several threads.
        limits: bounds.
        stale: what becomes of groups that are too old.
        num_groups: that the rest of the run needs; no more are begun.
    """

    def __init__(
        self,
        context: RolloutContext,
        stage: RolloutStage,
        source: DataSource,
        *,
        limits: StreamLimits,
        stale: StaleGroups,
        num_groups: int,
    ) -> None:
        self._stage, self._source, self._limits, self._stale = stage, source, limits, stale
        self._engines = ContinuingEngines(context.engines)
        self._context = replace(context, engines=self._engines)
        self._needed = num_groups
        self._gate, self._changed = Gate(), Pulse()
        self._gauges = StreamGauges()
        self._finished: deque[_Finished] = deque()
        self._pace = Pace(limits.max_staleness, limits.interval)
        self._kept = Kept(self._context, limits.batch, source)
        self._runner: GroupRunner | None = None
        self._work: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._version: PolicyVersion = 0
        self._next_version: PolicyVersion = 0
        """That of the trainer when it will be given the next rollout."""
        self._thread: LoopThread | None = None
        self._window: Begin | None = None

    # Called from the loop's thread

    def start(self, rollout_id: int, version: PolicyVersion) -> None:
        """Begin to generate. Args: version: of the weights that trainer and engines have."""
        assert self._thread is None, "a stream is started once"
        self._source.begin_rollout(self._context, rollout_id)
        self._window = self._stage.begin()
        self._thread = LoopThread("rollout-stream")
        self._thread.call(self._start(rollout_id, version))

    def take(self, rollout_id: int) -> RolloutResult:
        """The groups to train on next, waited for. Raises: whatever ended the generation."""
        assert self._thread is not None and self._window is not None, "the stream was not started"
        groups, kept, metrics = self._thread.call(self._take(rollout_id))
        result = kept.result(groups)
        result.metrics |= metrics
        result, self._window = self._stage.end(rollout_id, self._window, result)
        self._source.begin_rollout(self._context, rollout_id + 1)
        return result

    def pause(self) -> None:
        """Return when the engines may get other weights."""
        assert self._thread is not None
        self._thread.call(self._pause())

    def resume(self, version: PolicyVersion) -> None:
        """They have them; generation goes on."""
        assert self._thread is not None
        self._thread.call(self._resume(version))

    def stop(self) -> None:
        """End the generation of what nobody will train on; its prompts go back into the data source."""
        if self._thread is not None:
            self._thread.call(self._stop())

    def take_spans(self) -> list[Span]:
        """When engines generated, between weight syncs; for the trace."""
        return self._gauges.take_spans()

    def take_counts(self) -> list[tuple[float, dict[str, float]]]:
        """(Unix time, how many groups were where), whenever it changed; for the trace."""
        return self._gauges.take_counts()

    def __enter__(self) -> RolloutStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            thread.call(self._close(), _PATIENCE_S)
        except TimeoutError:
            logger.warning("the rollout stream does not end within %g s; it is left behind", _PATIENCE_S)
        except Exception as second:
            if error is None:
                raise
            error.add_note(f"and the rollout stream did not end as it should: {second!r}")
        finally:
            thread.close(_PATIENCE_S)

    # In the event loop

    async def _start(self, rollout_id: int, version: PolicyVersion) -> None:
        config = self._context.config
        self._version = self._next_version = version
        self._runner = GroupRunner(
            self._context,
            self._engines,
            sampling=rollout_sampling(config),
            seed_of=lambda group: group_seed(config, "stream", self._version, group.group_id),
            name="stream",
            rollout_id=rollout_id,
            max_context_len=config.rollout.rollout_max_context_len,
            generate_path=config.rollout.custom_generate_function_path,
            gate=self._gate,
            on_generated=self._note,
        )
        self._gauges.begin_span(version)
        self._work = asyncio.get_running_loop().create_task(self._run(self._runner))

    async def _run(self, runner: GroupRunner) -> None:
        """Until it is cancelled, or something fails."""
        try:
            async with LoopWatch(), asyncio.TaskGroup() as tasks:
                tasks.create_task(self._admit(runner))
                tasks.create_task(self._collect(runner))
        except* Exception as errors:
            self._failure = _first(errors)
            logger.warning("generation has failed, which ends the run: %s", self._failure)
            self._note()
            await runner.cancel()

    async def _admit(self, runner: GroupRunner) -> None:
        """Begin with new groups whenever there is room."""
        while True:
            await self._changed.until(lambda: self._room(runner) > 0)
            for group in take_groups(self._source, self._room(runner)):
                self._kept.stats.start(group)
                self._check_ends(runner, group)
                runner.start(group)
            self._note()

    def _check_ends(self, runner: GroupRunner, group: Group) -> None:
        """What validate_stream.py asks of the run's generate function, of one that a row names."""
        settings = self._context.config.rollout
        if not self._limits.in_flight and settings.custom_generate_timeout_s is None and runner.runs_function(group):
            raise ConfigError(
                f"group {group.group_id}: its row names a generate function (metadata.generate_function_path), and "
                "--no-update-weights-in-flight has each weight sync wait until its call returns; say how long a sample "
                "may take with --custom-generate-timeout-s"
            )

    async def _collect(self, runner: GroupRunner) -> None:
        """See what becomes of each group."""
        while True:
            await self._changed.until(lambda: runner.num_outstanding > 0)
            outcome = await runner.next_outcome()
            if outcome.is_aborted:
                self._source.put_back([self._kept.retry(outcome)])
            elif self._kept.add(outcome):
                self._finished.append(self._checked(outcome))
            self._note()

    def _room(self, runner: GroupRunner) -> int:
        """Groups that may be begun now, by the bounds; none where the run needs no more.

        The k-th group out (from 0) is trained on in rollout k // batch from the next one on, if they end in their
        order. The trainer's version rises by one in each, and this group's is the engines' now.
        """
        out = runner.num_outstanding + len(self._finished)
        ahead = self._pace.ahead + 1 - (self._next_version - self._version)
        allowed = min(ahead * self._limits.batch, self._needed)
        return min(allowed - out, self._limits.max_generating - runner.num_generating)

    def _checked(self, outcome: Outcome) -> _Finished:
        """A finished group with its age. Raises: DataError for a trainable token of no known version."""
        versions: list[PolicyVersion] = []
        for sample in outcome.group.samples:
            if unknown := num_without_version(sample):
                raise DataError(
                    f"sample {sample.sample_id} has {unknown} trainable tokens without a policy version, so how old "
                    "they are is not known; pass version=completion.weight_versions to append_response"
                )
            versions += trainable_versions(sample)
        assert outcome.fresh is not None
        return _Finished(outcome.group, outcome.fresh, min(versions, default=self._version), time.time())

    def _note(self) -> None:
        """Something has changed: whoever waits looks again."""
        runner = self._runner
        assert runner is not None
        self._gauges.put(
            generating=runner.num_generating,
            scoring=runner.num_outstanding - runner.num_generating,
            finished=len(self._finished),
        )
        self._changed.beat()

    async def _take(self, rollout_id: int) -> tuple[list[Group], Kept, Metrics]:
        batch, runner = self._limits.batch, self._runner
        assert runner is not None
        waited = False
        while True:
            self._leave_out_the_old()
            if self._failure is not None:
                raise self._failure
            if len(self._finished) >= batch:
                break
            if not waited:
                waited = True
                self._pace.waits(self._next_version - self._version)
                self._note()
            await self._changed.until(lambda: self._failure is not None or len(self._finished) >= batch)
        chosen = sorted(self._finished, key=lambda finished: finished.oldest)[:batch]  # equals as they finished
        for finished in chosen:
            self._finished.remove(finished)
            add_span(finished.group.samples, "queued", finished.since_s)
        if not waited:
            self._pace.leaves(len(self._finished) // batch)
        groups = [finished.group for finished in chosen]
        self._stale.mask(groups, self._next_version)
        self._needed -= batch
        self._next_version += 1
        runner.rollout_id = rollout_id + 1
        kept, self._kept = self._kept, Kept(self._context, batch, self._source)
        metrics = self._gauges.metrics() | self._stale.take_metrics()
        metrics["stream/continued_samples"] = float(self._engines.take_num_continued())
        metrics["stream/versions_ahead"] = float(self._pace.ahead)
        self._note()
        return groups, kept, metrics

    def _leave_out_the_old(self) -> None:
        """Those that the next rollout must not hold are handed out again, as prompts."""
        old = [f for f in self._finished if self._stale.leaves_out(f.oldest, self._next_version)]
        for finished in old:
            self._finished.remove(finished)
        if old:
            self._source.put_back([pending_again(one_sample_each(finished.fresh)) for finished in old])
            self._note()

    async def _pause(self) -> None:
        if not self._limits.in_flight:
            self._gate.shut()
            await self._gate.emptied()
        await self._engines.interrupt()  # between samples, too: a reward may ask the engines
        self._gauges.end_span()

    async def _resume(self, version: PolicyVersion) -> None:
        self._version = version
        self._gauges.begin_span(version)
        self._engines.go_on()
        self._gate.open()
        self._note()

    async def _stop(self) -> None:
        runner, work = self._runner, self._work
        if runner is None or work is None:
            return
        work.cancel()
        await asyncio.wait([work])
        self._source.put_back(await runner.stop())
        self._gauges.end_span()

    async def _close(self) -> None:
        if self._work is not None and self._runner is not None:
            self._work.cancel()
            await asyncio.wait([self._work])
            await self._runner.cancel()
        await self._engines.aclose()


def _first(errors: BaseExceptionGroup[Exception]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
