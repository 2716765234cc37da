"""The difference of trainer and engine over whole runs: its level between two settings, and its drift in one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from vime.observability.run_folder import read_metrics

METRIC = "train/train_rollout_logprob_abs_diff"
MAX_DRIFT = 0.2
"""Of the mean, over a run: what the fitted line may rise."""
MAX_RATIO = 0.8
"""Of the mean with R3 to that without."""
# Two-sided 95 % of Student's t, by degrees of freedom.
_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
_BLOCK, _T_MAX = 10, len(_T) + 1
"""Steps of a block at least; observations at most."""


def read_differences(run: Path) -> list[float]:
    """The metric of each step of a run, in their order. Args: run: its folder, or a copy of its metrics.jsonl.

    A run that was resumed has the steps after its checkpoint twice, and the later ones count; a line that a crash cut
    is none. Raises: ValueError if a step has none.
    """
    rows = read_metrics(run if run.is_file() else run / "metrics.jsonl").values()
    values = [row.get(METRIC) for row in rows if METRIC in row or "train/step" in row]
    if not values or any(value is None for value in values):
        raise ValueError(f"{run}: {sum(v is None for v in values)} of {len(values)} steps have no {METRIC}")
    return [float(value) for value in values]


@dataclass(frozen=True, slots=True)
class Drift:
    """A line fitted by least squares over the steps of a run."""

    mean: float
    rise: float
    """From the first step to the last, in nats."""
    error: float
    """Standard error of the rise."""

    @property
    def is_small(self) -> bool:
        """Whether it rises by at most MAX_DRIFT of the mean."""
        return self.rise <= MAX_DRIFT * self.mean


def drift(values: Sequence[float]) -> Drift:
    """Args: values: one a step, three at least."""
    n = len(values)
    if n < 3:
        raise ValueError(f"a drift needs 3 steps or more, got {n}")
    mean, middle = statistics.fmean(values), (n - 1) / 2
    squares = sum((k - middle) ** 2 for k in range(n))
    slope = sum((k - middle) * (v - mean) for k, v in enumerate(values)) / squares
    rest = sum((v - mean - slope * (k - middle)) ** 2 for k, v in enumerate(values))
    return Drift(mean, slope * (n - 1), math.sqrt(rest / (n - 2) / squares) * (n - 1))


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of means, over pairs; geometric mean, with its 95 % interval by Student's t."""

    value: float
    low: float
    high: float

    @property
    def is_lower(self) -> bool:
        """Whether it is at most MAX_RATIO, and its interval clear of 1."""
        return self.value <= MAX_RATIO and self.high < 1


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Args: one of each pair, 2 to 10 pairs. Raises: ValueError otherwise."""
    logs = [math.log(a / b) for a, b in zip(numerators, denominators, strict=True)]
    if len(logs) - 1 not in _T:
        raise ValueError(f"an interval needs 2 to 10 pairs of runs, got {len(logs)}")
    mean = statistics.fmean(logs)
    half = _T[len(logs) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def ratio_of_runs(numerators: Sequence[Sequence[float]], denominators: Sequence[Sequence[float]]) -> Ratio:
    """Of runs in pairs, such as with the same seed: each pair's means are one observation.

    A single pair is cut into blocks of steps, whose means are the observations: neighbouring steps are alike, so that
    steps by themselves would make the interval too narrow.

    Args: the metric of each step, a run each.
    Raises: ValueError for more than 10 pairs, or a pair alone that is not of 2 x _BLOCK steps in common.
    """
    pairs = list(zip(numerators, denominators, strict=True))
    if len(pairs) == 1:
        one, other = pairs[0]
        steps = min(len(one), len(other))
        count = min(steps // _BLOCK, _T_MAX)
        if count < 2:
            raise ValueError(f"a pair of runs alone needs {2 * _BLOCK} steps, got {steps}")
        edges = [round(k * steps / count) for k in range(count + 1)]
        pairs = [(one[a:b], other[a:b]) for a, b in pairwise(edges)]
    return ratio([statistics.fmean(a) for a, _ in pairs], [statistics.fmean(b) for _, b in pairs])
