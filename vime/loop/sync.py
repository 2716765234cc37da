"""The synchronous loop: generate, train, publish, one after the other. The RL step, on protocols alone.

Below it are the parts of a step, for other loops, too. Stages are timed where they happen, and their times add up to
the step's (perf/*_time in docs/metrics.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from vime.loop.cadence import Cadence, StopRule
from vime.loop.recorder import Recorder, Step
from vime.loop.staleness import staleness_metrics, version_after
from vime.protocols import Trainer, Turns
from vime.types import Group, Metrics, PolicyVersion, RolloutResult, TrainBatch


class Rollout(Protocol):
    """The user's rollout function with its arguments bound."""

    def generate(self, rollout_id: int) -> RolloutResult:
        """The groups of one rollout."""

    def evaluate(self, rollout_id: int) -> RolloutResult:
        """Samples and metrics of all held-out sets under the weights the engines have now."""

    def call_off(self) -> None:
        """End a `generate` that runs in another thread, if it can be ended; nobody waits for its groups."""


class Publisher(Protocol):
    """The weight sync."""

    metrics: Metrics
    """Of the last publish."""

    def publish(self, version: PolicyVersion) -> PolicyVersion:
        """Bring the trainer's weights to every engine, verified, as this version; the one they have from now on."""


class Checkpoints(Protocol):
    """What is kept of the trainer; see `CheckpointKeeper`."""

    def trained(self, rollout_id: int, groups: Sequence[Group]) -> None:
        """The trainer has learnt from these groups: the next `save` is of them, too."""

    def save(self, rollout_id: int, metrics: Metrics) -> None:
        """Write a checkpoint to resume from, or begin to. Args: metrics: of the step so far."""

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
    turns: Turns | None = None
    """Where trainer and engines take turns on the same devices; a weight sync is one of them (vime/loop/turns.py)."""


def run_sync(
    stages: Stages, cadence: Cadence, recorder: Recorder, *, start: int, eval_before: bool, stop: StopRule
) -> int:
    """Train on rollouts start … cadence.num_rollout - 1, or until `stop` says so.

    Returns: the last rollout that was trained on; `start - 1` if there was nothing to do.
    Raises: whatever a stage raises; nothing is retried here and no step is skipped in silence.
    """
    if stop.is_met:
        return start - 1  # resumed from where the rule ended the run
    version = begin(stages, recorder, start=start, eval_before=eval_before)
    for rollout_id in range(start, cadence.num_rollout):
        with recorder.step(rollout_id) as step:
            with step.stage("rollout"):
                result = stages.rollout.generate(rollout_id)
            weights_follow = cadence.publish_due(rollout_id, last=cadence.is_last(rollout_id))
            to_training(stages, step, weights_follow=weights_follow)
            train(stages, step, rollout_id, result, version)
            last = cadence.is_last(rollout_id) or stop.reached(step.metrics)
            save(stages, step, cadence, rollout_id, last=last)
            if cadence.publish_due(rollout_id, last=last):
                version = publish(stages, step, rollout_id)
            to_generation(stages, step)
            if cadence.eval_due(rollout_id, last=last):
                evaluate(stages, step, rollout_id)
            stages.checkpoints.settle(rollout_id, step.metrics)
        if last:
            stages.checkpoints.finish()
            return rollout_id
    return start - 1


def begin(stages: Stages, recorder: Recorder, *, start: int, eval_before: bool) -> PolicyVersion:
    """What comes before the first step. Returns: the version that the engines have then."""
    with recorder.setup(start) as setup:
        with setup.stage("update_weights"):  # a resumed trainer is ahead of what the engines loaded
            version = stages.publisher.publish(version_after(start - 1))
        if stages.turns is not None:
            stages.turns.take_metrics()  # no step's
        if eval_before:
            evaluate(stages, setup, start - 1)
    return version


def to_training(stages: Stages, step: Step, *, weights_follow: bool) -> None:
    """Give the devices that both sides share to the trainer. Args: weights_follow: a sync comes before generation."""
    if stages.turns is not None:
        with step.stage("to_training"):
            stages.turns.to_training(weights_follow=weights_follow)


def to_generation(stages: Stages, step: Step) -> None:
    """Give the shared devices to the engines, if the weight sync has not."""
    if stages.turns is not None:
        with step.stage("to_generation"):
            stages.turns.to_generation()
        step.add(stages.turns.take_metrics())


def train(stages: Stages, step: Step, rollout_id: int, result: RolloutResult, version: PolicyVersion) -> None:
    """Train on a rollout. Args: version: of the weights that generated it."""
    with step.stage("make_batch"):
        batch, batch_metrics = stages.make_batch(rollout_id, result.groups)
        step.keep_batch(batch)
    with step.rollout_kept_meanwhile(result.groups), step.stage("train"):
        train_metrics = stages.trainer.train(batch)
    stages.checkpoints.trained(rollout_id, result.groups)
    step.add(result.metrics | batch_metrics | train_metrics | {"train/policy_version": float(version)})
    step.add(staleness_metrics(result.groups, version_after(rollout_id - 1)))


def save(stages: Stages, step: Step, cadence: Cadence, rollout_id: int, *, last: bool) -> None:
    """Write what is due after a rollout was trained on: a checkpoint, an HF checkpoint."""
    if cadence.save_due(rollout_id, last=last):
        with step.stage("save_model"):
            stages.checkpoints.save(rollout_id, step.metrics)
    if cadence.export_due(rollout_id, last=last):
        with step.stage("save_hf"):
            stages.checkpoints.export_hf(rollout_id)


def publish(stages: Stages, step: Step, rollout_id: int) -> PolicyVersion:
    """Give the engines the weights trained on this rollout. Returns: their version."""
    with step.stage("update_weights"):
        version = stages.publisher.publish(version_after(rollout_id))
        step.add(stages.publisher.metrics)
    return version


def evaluate(stages: Stages, step: Step, rollout_id: int) -> None:
    """Evaluate the weights that the engines have."""
    with step.stage("eval"):
        step.add_evaluation(stages.rollout.evaluate(rollout_id))
