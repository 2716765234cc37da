"""Times the stages of each step and writes down what happened: metrics, rollouts, progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from vime.observability.progress import RunProgress
from vime.observability.run_folder import RunFolder
from vime.observability.timers import StageTimer
from vime.observability.writers import MetricWriter
from vime.types import Group, Metrics, RolloutResult


class Step:
    """One step while it runs: time its stages, add its metrics."""

    def __init__(self, progress: RunProgress, folder: RunFolder | None, rollout_id: int) -> None:
        self.metrics: Metrics = {}
        self._progress, self._folder, self._rollout_id = progress, folder, rollout_id
        self.timer = StageTimer()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Announce and time a stage."""
        self._progress.stage(name)
        with self.timer.stage(name):
            yield

    def add(self, metrics: Mapping[str, float]) -> None:
        """Metrics of this step."""
        self.metrics.update(metrics)

    def keep_rollout(self, groups: Sequence[Group]) -> None:
        """Write the groups that are trained on into the run folder, where the run keeps them."""
        if self._folder is not None:
            self._folder.write_rollout(self._rollout_id, groups)

    def add_evaluation(self, result: RolloutResult) -> None:
        """Metrics of an evaluation; its samples go into the run folder, where the run keeps them."""
        self.add(result.metrics)
        if self._folder is not None:
            self._folder.write_evaluation(self._rollout_id, result.groups)


class Recorder:
    """Made once per run; `setup` once, then `step` for each rollout in order.

    Args:
        folder: the run's folder.
        progress: where to say what is going on.
        writer: takes each step's metrics.
        keep_rollouts: write the samples of rollouts and evaluations.
    """

    def __init__(
        self, folder: RunFolder, progress: RunProgress, writer: MetricWriter, *, keep_rollouts: bool = True
    ) -> None:
        self._folder, self._progress, self._writer = folder, progress, writer
        self._keep = keep_rollouts

    @contextmanager
    def setup(self, start: int) -> Iterator[Step]:
        """What comes before the first step: written as step `start - 1`, without step times, if it has metrics."""
        step = Step(self._progress, self._folder if self._keep else None, start - 1)
        yield step
        if step.metrics:
            self._writer.write(start - 1, step.metrics)
            self._progress.message(
                "before the first step · " + " · ".join(f"{k} {v:.3f}" for k, v in step.metrics.items() if "-" not in k)
            )

    @contextmanager
    def step(self, rollout_id: int) -> Iterator[Step]:
        """One step. Its metrics are written when it ends well; a failed step leaves none."""
        step = Step(self._progress, self._folder if self._keep else None, rollout_id)
        yield step
        metrics = step.metrics | step.timer.metrics()
        self._writer.write(rollout_id, metrics)
        self._progress.step(rollout_id, metrics)
