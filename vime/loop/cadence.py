"""When to evaluate and when to save."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cadence:
    """Pure predicates on the number of a finished rollout; the last one always evaluates and saves.

    `eval_interval` and `save_interval` count rollouts; None means only after the last one.
    """

    num_rollout: int
    eval_interval: int | None = None
    save_interval: int | None = None
    evaluates: bool = False
    saves: bool = False

    def eval_due(self, rollout_id: int) -> bool:
        """Whether to evaluate after this rollout was trained on."""
        return self.evaluates and self._due(rollout_id, self.eval_interval)

    def save_due(self, rollout_id: int) -> bool:
        """Whether to write a checkpoint after this rollout was trained on."""
        return self.saves and self._due(rollout_id, self.save_interval)

    def _due(self, rollout_id: int, interval: int | None) -> bool:
        if rollout_id + 1 == self.num_rollout:
            return True
        return interval is not None and (rollout_id + 1) % interval == 0
