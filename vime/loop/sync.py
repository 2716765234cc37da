"""The synchronous loop: generate, train, publish, one after the other. The RL step, on protocols alone.

Stages are timed where they happen, and their times add up to the step's (perf/*_time in docs/metrics.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from vime.loop.cadence import Cadence, StopRule
from vime.loop.recorder import Recorder
from vime.protocols import Trainer
from vime.types import Group, Metrics, PolicyVersion, RolloutResult, TrainBatch


class Rollout(Protocol):
    """The user's rollout function with its arguments bound."""

    def generate(self, rollout_id: int) -> RolloutResult:
        """The groups of one rollout."""

    def evaluate(self, rollout_id: int) -> RolloutResult:
        """Samples and metrics of all held-out sets under the weights the engines have now."""


class Publisher(Protocol):
    """The weight sync."""

    metrics: Metrics
    """Of the last publish."""

    def publish(self) -> PolicyVersion:
        """Bring the trainer's weights to every engine, verified; the version they have from now on."""


class Checkpoints(Protocol):
    """What is kept of the trainer; see `CheckpointKeeper`."""

    def save(self, rollout_id: int) -> None:
        """Write a checkpoint to resume from, or begin to."""

    def export_hf(self, rollout_id: int) -> None:
        """Write an HF checkpoint."""

    def settle(self, rollout_id: int, metrics: Metrics) -> None:
        """The step has ended with these metrics."""

    def finish(self) -> None:
        """Wait for what is being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """What a loop drives; built by orchestration."""

    rollout: Rollout
    trainer: Trainer
    publisher: Publisher
    make_batch: Callable[[int, list[Group]], tuple[TrainBatch, Metrics]]
    checkpoints: Checkpoints


def run_sync(
    stages: Stages, cadence: Cadence, recorder: Recorder, *, start: int, eval_before: bool, stop: StopRule
) -> int:
    """Train on rollouts start … cadence.num_rollout - 1, or until `stop` says so.

    Returns: the last rollout that was trained on; `start - 1` if there was nothing to do.
    Raises: whatever a stage raises; nothing is retried here and no step is skipped in silence.
    """
    if stop.is_met:
        return start - 1  # resumed from where the rule ended the run
    with recorder.setup(start) as setup:
        with setup.stage("update_weights"):
            version = stages.publisher.publish()  # a resumed trainer is ahead of what the engines loaded
        if eval_before:
            with setup.stage("eval"):
                setup.add_evaluation(stages.rollout.evaluate(start - 1))

    for rollout_id in range(start, cadence.num_rollout):
        with recorder.step(rollout_id) as step:
            with step.stage("rollout"):
                result = stages.rollout.generate(rollout_id)
            with step.stage("make_batch"):
                batch, batch_metrics = stages.make_batch(rollout_id, result.groups)
                step.keep_rollout(result.groups)
                step.keep_batch(batch)
            with step.stage("train"):
                train_metrics = stages.trainer.train(batch)
            step.add(result.metrics | batch_metrics | train_metrics | {"train/policy_version": float(version)})
            last = cadence.is_last(rollout_id) or stop.reached(step.metrics)
            if cadence.save_due(rollout_id, last=last):
                with step.stage("save_model"):
                    stages.checkpoints.save(rollout_id)
            if cadence.export_due(rollout_id, last=last):
                with step.stage("save_hf"):
                    stages.checkpoints.export_hf(rollout_id)
            with step.stage("update_weights"):
                version = stages.publisher.publish()
                step.add(stages.publisher.metrics)
            if cadence.eval_due(rollout_id, last=last):
                with step.stage("eval"):
                    step.add_evaluation(stages.rollout.evaluate(rollout_id))
            stages.checkpoints.settle(rollout_id, step.metrics)
        if last:
            stages.checkpoints.finish()
            return rollout_id
    return start - 1
