"""Fully asynchronous: engines generate all the time, the trainer takes what is finished. The parts of a step: sync.py.

    engines   ── version 3 ───────┐sync┌── version 4 ────────┐sync┌── version 5 ──
    trainer   train r, save ──────┘    └ take r+1, train ────┘    └ take r+2, train

Nothing waits for the slowest sample but its own group. How old a group may be is bounded where groups are begun and
where they are taken (vime/rollout/stream.py), and each waits for the other: the trainer for a whole rollout, generation
for room. A checkpoint keeps what is under way as such, too: a resume hands it out first.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from vime.loop.cadence import Cadence, StopRule
from vime.loop.recorder import Recorder, Step
from vime.loop.sync import Stages, begin, evaluate, publish, save, train
from vime.observability.trace import Span
from vime.types import PolicyVersion, RolloutResult


class Stream(Protocol):
    """Generation that goes on beside the loop. As a context manager it ends with the loop, whatever ends that.

    Order of calls: `start`; then `take` for each rollout, `pause` and `resume` around each weight sync; `stop` where
    the run ends, before what is saved then.
    """

    def start(self, rollout_id: int, version: PolicyVersion) -> None:
        """Begin to generate. Args: version: of the weights that trainer and engines have."""

    def take(self, rollout_id: int) -> RolloutResult:
        """The groups to train on next, waited for. Raises: whatever ended the generation."""

    def pause(self) -> None:
        """Return when the engines may get other weights."""

    def resume(self, version: PolicyVersion) -> None:
        """They have them; generation goes on."""

    def stop(self) -> None:
        """End the generation of what nobody will train on; its prompts go back into the data source."""

    def take_spans(self) -> list[Span]:
        """When engines generated since the last call; for the trace."""

    def take_counts(self) -> list[tuple[float, dict[str, float]]]:
        """(Unix time, how many groups were where) since the last call; for the trace."""

    def __enter__(self) -> Stream: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None: ...


def run_fully_async(
    stages: Stages,
    cadence: Cadence,
    recorder: Recorder,
    *,
    stream: Stream,
    start: int,
    eval_before: bool,
    stop: StopRule,
) -> int:
    """Train on rollouts start … cadence.num_rollout - 1, or until `stop` says so; as `run_sync`.

    Returns: the last rollout that was trained on; `start - 1` if there was nothing to do.
    Raises: whatever a stage raises. Where generation fails, the training beside it ends first.
    """
    if stop.is_met:
        return start - 1  # resumed from where the rule ended the run
    version = begin(stages, recorder, start=start, eval_before=eval_before)
    with stream:
        if start < cadence.num_rollout:
            stream.start(start, version)
        for rollout_id in range(start, cadence.num_rollout):
            with recorder.step(rollout_id) as step:
                with step.stage("rollout_wait"):
                    result = stream.take(rollout_id)
                train(stages, step, rollout_id, result, version)
                last = cadence.is_last(rollout_id) or stop.reached(step.metrics)
                if last:
                    stream.stop()
                save(stages, step, cadence, rollout_id, last=last)
                if cadence.publish_due(rollout_id, last=last):
                    with step.stage("rollout_pause"):
                        stream.pause()
                    version = publish(stages, step, rollout_id)
                    stream.resume(version)
                if cadence.eval_due(rollout_id, last=last):
                    evaluate(stages, step, rollout_id)
                _trace(step, stream)
                stages.checkpoints.settle(rollout_id, step.metrics)
            if last:
                stages.checkpoints.finish()
                return rollout_id
    return start - 1


def _trace(step: Step, stream: Stream) -> None:
    step.beside += stream.take_spans()
    step.counts += stream.take_counts()
