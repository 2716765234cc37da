"""Evaluation alone: held-out sets under the weights the engines have, and no training."""

from __future__ import annotations

from vime.loop.recorder import Recorder
from vime.loop.sync import Rollout


def run_evaluation_only(rollout: Rollout, recorder: Recorder, *, rollout_id: int) -> None:
    """Evaluate once. Args: rollout_id: the last rollout the weights were trained on; -1 for none."""
    with recorder.evaluation(rollout_id) as step, step.stage("eval"):
        step.add_evaluation(rollout.evaluate(rollout_id))
