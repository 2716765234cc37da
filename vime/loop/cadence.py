"""When to evaluate, when to save, and when to stop."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vime.errors import TrainingError


@dataclass(frozen=True, slots=True)
class Cadence:
    """Pure predicates on the number of a finished rollout; the last one always evaluates and saves.

    Intervals count rollouts; None means only after the last one.
    """

    num_rollout: int
    eval_interval: int | None = None
    save_interval: int | None = None
    evaluates: bool = False
    saves: bool = False
    export_interval: int | None = None
    exports: bool = False
    publish_interval: int = 1
    """Rollouts that engines generate by the same weights."""

    def is_last(self, rollout_id: int) -> bool:
        """Whether the run ends with this rollout by its number."""
        return rollout_id + 1 == self.num_rollout

    def eval_due(self, rollout_id: int, *, last: bool) -> bool:
        """Whether to evaluate after this rollout was trained on; `last`: the run ends with it."""
        return self.evaluates and self._due(rollout_id, self.eval_interval, last)

    def save_due(self, rollout_id: int, *, last: bool) -> bool:
        """Whether to write a checkpoint after this rollout was trained on."""
        return self.saves and self._due(rollout_id, self.save_interval, last)

    def export_due(self, rollout_id: int, *, last: bool) -> bool:
        """Whether to write an HF checkpoint after this rollout was trained on."""
        return self.exports and self._due(rollout_id, self.export_interval, last)

    def publish_due(self, rollout_id: int, *, last: bool) -> bool:
        """Whether the engines get the weights trained on this rollout."""
        return self._due(rollout_id, self.publish_interval, last)

    @staticmethod
    def _due(rollout_id: int, interval: int | None, last: bool) -> bool:
        return last or (interval is not None and (rollout_id + 1) % interval == 0)


class StopRule:
    """Ends a run early: when the mean of a metric over the last `window` rollouts crosses a bound.

    Args:
        metric: its name; None never stops.
        below, above: the bounds; None is no bound.
        window: rollouts to average over; fewer than that never stop.
    """

    def __init__(
        self, metric: str | None = None, *, below: float | None = None, above: float | None = None, window: int = 1
    ) -> None:
        self._metric, self._below, self._above = metric, below, above
        self._values: deque[float] = deque(maxlen=window)

    def __str__(self) -> str:
        return f"{self._metric} was {self._mean:g} on average over {len(self._values)} rollouts"

    @property
    def _mean(self) -> float:
        return sum(self._values) / len(self._values) if self._values else math.nan

    def state(self) -> dict[str, Any]:
        """JSON-ready; what `restore` needs to go on with the same window."""
        return {"metric": self._metric, "values": list(self._values)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; values of another metric are left behind."""
        if state["metric"] == self._metric:
            self._values.extend(state["values"])

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Take one rollout's metrics and say whether to stop. Raises: TrainingError if they lack the metric."""
        if self._metric is None:
            return False
        if self._metric not in metrics:
            raise TrainingError(f"--stop-metric {self._metric} is not among the metrics: {', '.join(sorted(metrics))}")
        self._values.append(metrics[self._metric])
        return self.is_met

    @property
    def is_met(self) -> bool:
        """Whether the window of now says to stop: also true of the checkpoint of a run that was stopped by it."""
        if not self._values or len(self._values) < (self._values.maxlen or 0):
            return False
        mean = self._mean
        return (self._below is not None and mean <= self._below) or (self._above is not None and mean >= self._above)
