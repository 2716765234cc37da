"""A difference by place in the response and by the token's probability."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

PROBABILITIES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class Bin:
    """Tokens of a range."""

    low: float
    high: float
    count: int
    mean: float
    """Mean absolute difference; NaN without a token."""

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        mean = self.mean if math.isfinite(self.mean) else None
        return {"low": self.low, "high": self.high, "count": self.count, "mean": mean}


def by_position(apart: npt.NDArray[np.float64], position: npt.NDArray[np.int64]) -> list[Bin]:
    """Bins that double: 0, 1, 2 to 3, 4 to 7, …

    Args: apart: [N] absolute differences. position: [N] in the response.
    """
    last = int(position.max(initial=0))
    return _bins(apart, position, [0, *(2**k for k in range(last.bit_length() + 1))])


def by_probability(apart: npt.NDArray[np.float64], log_probs: npt.NDArray[np.float64]) -> list[Bin]:
    """Args: log_probs: [N] of the tokens, by the engine."""
    return _bins(apart, np.exp(log_probs), PROBABILITIES)


def _bins(apart: npt.NDArray[np.float64], values: npt.NDArray[Any], edges: Sequence[float]) -> list[Bin]:
    """The last bin has its upper edge, and what is above."""
    which = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    bins = []
    for k, (low, high) in enumerate(itertools.pairwise(edges)):
        inside = which == k
        mean = float(apart[inside].mean()) if inside.any() else math.nan
        bins.append(Bin(low, high, int(inside.sum()), mean))
    return bins
