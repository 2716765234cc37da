"""Generation alone: rollouts by the weights the engines started with, kept in files, and nobody trains on them."""

from __future__ import annotations

from vime.loop.recorder import Recorder
from vime.loop.sync import Rollout


def run_rollout_only(rollout: Rollout, recorder: Recorder, *, start: int, num_rollout: int) -> None:
    """Generate rollouts start … num_rollout - 1. Raises: whatever the rollout function raises."""
    for rollout_id in range(start, num_rollout):
        with recorder.step(rollout_id) as step:
            with step.stage("rollout"):
                result = rollout.generate(rollout_id)
            step.keep_rollout(result.groups)
            step.add(result.metrics)
