"""Times the stages of each step and writes down what happened: metrics, rollouts, progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from vime.loop.flat_rewards import FlatRewards
from vime.observability.derived import derived_metrics
from vime.observability.eval_table import eval_table, set_of
from vime.observability.progress import RunProgress
from vime.observability.rollout_file import write_rollout
from vime.observability.run_folder import RunFolder, whole
from vime.observability.start_times import StartTimes, start_line
from vime.observability.timers import StageTimer
from vime.observability.trace import Span, SpanLog
from vime.observability.trace_file import RunTracer
from vime.observability.train_data import write_train_data
from vime.observability.writers import MetricWriter
from vime.types import Group, Metrics, RolloutResult, TrainBatch


@dataclass(frozen=True, slots=True)
class Copies:
    """Files to write beside the run folder, each rollout's with {rollout_id} replaced; None for none."""

    rollout_data: str | None = None
    train_data: str | None = None


@dataclass(frozen=True, slots=True)
class RewardKeys:
    """The entries of dict rewards that count, in training and in evaluation."""

    train: str | None = None
    eval: str | None = None


class Step:
    """One step while it runs: time its stages, add its metrics."""

    def __init__(
        self,
        progress: RunProgress,
        folder: RunFolder | None,
        rollout_id: int,
        copies: Copies,
        keys: RewardKeys,
        begin: float | None = None,
    ) -> None:
        self.metrics: Metrics = {}
        self._keys = keys
        self._progress, self._folder, self._rollout_id, self._copies = progress, folder, rollout_id, copies
        self.timer = StageTimer(start=begin)
        self.spans = SpanLog()
        self.groups: Sequence[Group] = ()
        self.evaluated: Sequence[Group] = ()
        self.beside: list[Span] = []
        """What ran beside the stages, perhaps since an earlier step; for the trace."""
        self.counts: list[tuple[float, dict[str, float]]] = []
        """(Unix time, groups by place) beside the stages; for the trace."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Announce and time a stage."""
        self._progress.stage(name)
        with self.timer.stage(name), self.spans.span(name):
            yield

    def add(self, metrics: Mapping[str, float]) -> None:
        """Metrics of this step; a user's function may give numbers of NumPy's or torch's, which JSON lacks."""
        self.metrics.update((name, float(value)) for name, value in metrics.items())

    def keep_rollout(self, groups: Sequence[Group]) -> None:
        """Write the groups that are trained on into the run folder, where the run keeps them."""
        self.groups = groups
        if self._folder is not None:
            self._folder.write_rollout(self._rollout_id, groups, self._keys.train)
        if self._copies.rollout_data is not None:
            with self._copy(self._copies.rollout_data) as path:
                write_rollout(path, self._rollout_id, groups, self._keys.train)

    @contextmanager
    def rollout_kept_meanwhile(self, groups: Sequence[Group]) -> Iterator[None]:
        """`keep_rollout` beside the block, which ends when all is written: half a second for 500,000 tokens.

        Raises: OSError (a full disk), if the block itself ended well.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="rollout-file") as pool:
            writing = pool.submit(self.keep_rollout, groups)
            yield
        writing.result()

    def keep_batch(self, batch: TrainBatch) -> None:
        """Write what the trainer is given, where the run is to."""
        if self._copies.train_data is not None:
            with self._copy(self._copies.train_data) as path:
                write_train_data(path, batch)

    def _copy(self, text: str) -> AbstractContextManager[Path]:
        path = Path(text.format(rollout_id=self._rollout_id))
        path.parent.mkdir(parents=True, exist_ok=True)
        return whole(path)

    def add_evaluation(self, result: RolloutResult) -> None:
        """Metrics of an evaluation; its samples go into the run folder, where the run keeps them."""
        self.add(result.metrics)
        self.evaluated = result.groups
        if self._folder is not None:
            self._folder.write_evaluation(self._rollout_id, result.groups, self._keys.eval)


class Recorder:
    """Made once per run; `setup` once, then `step` for each rollout in order.

    Args:
        folder: the run's folder.
        progress: where to say what is going on.
        writer: takes each step's metrics.
        keep_rollouts: write the samples of rollouts and evaluations.
        copies: further files of each step.
        tracer: writes the trace, where there is to be one.
        reward_keys: which entries of dict rewards the files name as the reward.
        times: of the program's start, which ends with `setup`.
    """

    def __init__(
        self,
        folder: RunFolder,
        progress: RunProgress,
        writer: MetricWriter,
        *,
        keep_rollouts: bool = True,
        copies: Copies = Copies(),
        tracer: RunTracer | None = None,
        reward_keys: RewardKeys = RewardKeys(),
        times: StartTimes | None = None,
    ) -> None:
        self._folder, self._progress, self._writer = folder, progress, writer
        self._keep, self._copies, self._keys, self._tracer = keep_rollouts, copies, reward_keys, tracer
        self._last_end: float | None = None
        self._flat = FlatRewards()
        self._times = times
        self._start: Metrics = {}
        """What the start took; written with the first step."""

    @contextmanager
    def setup(self, start: int) -> Iterator[Step]:
        """What comes before the first step: written as step `start - 1`, without step times, if it has metrics."""
        step = Step(self._progress, self._folder if self._keep else None, start - 1, self._copies, self._keys)
        yield step
        self._trace(step, start - 1)
        if step.metrics:
            self._writer.write(start - 1, step.metrics)
            self._progress.message(
                "before the first step · " + " · ".join(f"{k} {v:.3f}" for k, v in step.metrics.items() if set_of(k))
            )
        if self._times is not None:
            self._start = self._times.metrics(step.timer.metrics())
            self._progress.message(start_line(self._start))

    @contextmanager
    def evaluation(self, rollout_id: int) -> Iterator[Step]:
        """An evaluation that is the whole run: a row of metrics like a step's, and a table to read."""
        step = Step(self._progress, self._folder if self._keep else None, rollout_id, self._copies, self._keys)
        yield step
        self._trace(step, rollout_id)
        self._writer.write(rollout_id, step.metrics | step.timer.metrics())
        self._progress.message(eval_table(step.metrics))

    @contextmanager
    def step(self, rollout_id: int) -> Iterator[Step]:
        """One step, from the end of the one before it. Its metrics are written when it ends well; a failed step
        leaves none. Writing them is part of the next step's time."""
        folder = self._folder if self._keep else None
        step = Step(self._progress, folder, rollout_id, self._copies, self._keys, self._last_end)
        yield step
        metrics = step.metrics | step.timer.metrics()
        self._last_end = step.timer.end
        metrics |= derived_metrics(metrics) | {"memory/driver_rss_bytes": float(psutil.Process().memory_info().rss)}
        metrics |= self._start
        self._start = {}
        self._writer.write(rollout_id, metrics)
        if (warning := self._flat.note(rollout_id, metrics)) is not None:
            self._progress.message(warning)
        self._trace(step, rollout_id)
        self._progress.step(rollout_id, metrics)

    def _trace(self, step: Step, rollout_id: int) -> None:
        if self._tracer is not None:
            stages = step.spans.take()
            self._tracer.step(
                stages, step.groups, step.evaluated, beside=step.beside, counts=step.counts, rollout_id=rollout_id
            )
