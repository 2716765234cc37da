"""How far two columns of log-probs of the same sampled tokens are apart."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vime.algo.mismatch import log_prob_abs_diff, trajectory_mean

_OVERFLOW = 700.0  # exp of more is not a float64


@dataclass(frozen=True, slots=True)
class Difference:
    """Of log-probs `other` to log-probs `sampler`, in nats; the sampler sampled the tokens.

    mean, p99, max: of |other - sampler|, as the metric train/train_rollout_logprob_abs_diff has them.
    signed: mean of other - sampler. k3: an estimate of KL(sampler || other), exp(x) - 1 - x of x = other - sampler.
    Means are over tokens inside each trajectory, then over trajectories; p99 and max over all tokens.
    """

    mean: float
    p99: float
    max: float
    signed: float
    k3: float
    num_tokens: int

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; null where it is not finite."""
        return {k: v if math.isfinite(v) else None for k, v in asdict(self).items()}


def difference(other: npt.NDArray[Any], sampler: npt.NDArray[Any], trajectory: npt.NDArray[Any]) -> Difference:
    """Args: other, sampler: [N] log-probs of the same tokens. trajectory: [N] int, equal inside a trajectory.

    Returns: all NaN, and no token, if there are none.
    """
    on = np.ones(len(other), np.bool_)
    if not len(other):
        return Difference(math.nan, math.nan, math.nan, math.nan, math.nan, 0)
    num = len(np.unique(trajectory))
    apart = other.astype(np.float64) - sampler.astype(np.float64)
    abs_diff = log_prob_abs_diff(other, sampler, on, trajectory, num)
    k3 = np.expm1(np.minimum(apart, _OVERFLOW)) - apart
    return Difference(
        mean=abs_diff.mean,
        p99=abs_diff.p99,
        max=abs_diff.max,
        signed=trajectory_mean(apart, on, trajectory, num),
        k3=trajectory_mean(k3, on, trajectory, num),
        num_tokens=len(other),
    )
