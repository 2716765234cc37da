"""One step ahead: rollout r + 1 is generated while r is trained on. The same parts of a step as in sync.py.

    engines   generate r+1 ──────────────┐      ┌ generate r+2 ───
    trainer   train r, save ─── wait ────┴ sync ┴ train r+1 ──────

The weight sync waits for the generation under way, so that every token of a rollout is of one version (groups that
--partial-rollout carries over from an earlier one keep their older tokens); the samples are then one version behind the
trainer. A checkpoint of r keeps the groups of r + 1 as being under way: a resume hands them out first.
"""

from __future__ import annotations

import time

from vime.loop.ahead import RolloutAhead
from vime.loop.cadence import Cadence, StopRule
from vime.loop.recorder import Recorder
from vime.loop.sync import Stages, begin, evaluate, publish, save, train


def run_overlapped(
    stages: Stages, cadence: Cadence, recorder: Recorder, *, start: int, eval_before: bool, stop: StopRule
) -> int:
    """Train on rollouts start … cadence.num_rollout - 1, or until `stop` says so; as `run_sync`.

    A rollout that is under way when `stop` ends the run is called off: its prompts are the next after a resume.

    Returns: the last rollout that was trained on; `start - 1` if there was nothing to do.
    Raises: whatever a stage raises. Where generation fails, the training beside it ends first.
    """
    if stop.is_met:
        return start - 1  # resumed from where the rule ended the run
    version = begin(stages, recorder, start=start, eval_before=eval_before)
    with RolloutAhead(stages.rollout) as ahead:
        if start < cadence.num_rollout:
            ahead.start(start, version)
        for rollout_id in range(start, cadence.num_rollout):
            with recorder.step(rollout_id) as step:
                with step.stage("rollout_wait"):
                    made = ahead.take()
                step.add({"perf/rollout_s": made.seconds, "perf/rollout_ready_s": time.perf_counter() - made.end})
                step.beside.append(made.span)
                if not cadence.is_last(rollout_id):
                    ahead.start(rollout_id + 1, version)
                train(stages, step, rollout_id, made.result, made.version)
                last = cadence.is_last(rollout_id) or stop.reached(step.metrics)
                save(stages, step, cadence, rollout_id, last=last)
                publishes = cadence.publish_due(rollout_id, last=last)
                evaluates = cadence.eval_due(rollout_id, last=last)
                if publishes or evaluates:
                    with step.stage("rollout_wait"):
                        if last:
                            ahead.call_off()
                        ahead.wait()
                if publishes:
                    version = publish(stages, step, rollout_id)
                if evaluates:
                    evaluate(stages, step, rollout_id)
                stages.checkpoints.settle(rollout_id, step.metrics)
            if last:
                stages.checkpoints.finish()
                return rollout_id
    return start - 1
