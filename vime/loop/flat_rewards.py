"""Notices rollouts that teach nothing: every group's rewards are equal, so every advantage is 0."""

from __future__ import annotations

import math

from vime.types import Metrics

_ZERO = 1e-6  # of an advantage: what rounding leaves of a mean of equal rewards


class FlatRewards:
    """Made once per run; `note` after each rollout. Warns at the 1st such in a row, then the 2nd, 4th, 8th, …"""

    def __init__(self) -> None:
        self._in_a_row = 0

    def note(self, rollout_id: int, metrics: Metrics) -> str | None:
        """A warning to print, when one is due."""
        bounds = [metrics.get(f"rollout/advantages/{name}", 1.0) for name in ("min", "max")]
        if metrics.get("rollout/zero_std") != 1.0 or max(map(abs, bounds)) > _ZERO:
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        if self._in_a_row & (self._in_a_row - 1):
            return None
        times = f", {self._in_a_row} rollouts in a row" if self._in_a_row > 1 else ""
        mean = metrics.get("rollout/raw_reward", math.nan)
        return (
            f"warning: rollout {rollout_id}: the rewards of every group are equal (mean {mean:g}), so all advantages "
            f"are 0 and nothing is learned from it{times}; each prompt's responses all earned the same (solved always "
            "or never), or the reward is wrong: read the rollout's samples"
        )
