"""How far the trainer's log-probs are from the engine's, on the same tokens under the same weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_LARGEST = 300.0  # nats; exp of it, and a sum of such, are finite in float64


class LogProbDiff(NamedTuple):
    """Nats. `mean` over tokens inside each trajectory, then over trajectories; `p99` and `max` over all tokens."""

    mean: float
    p99: float
    max: float


def trajectory_mean(
    values: npt.NDArray[Any], mask: npt.NDArray[Any], trajectory_index: npt.NDArray[Any], n_global: int
) -> float:
    """Mean over tokens under mask 1 inside each trajectory, siblings pooled, summed over trajectories / n_global.

    Args:
        values: [T] float. Values under mask 0 may be NaN and do not count.
        mask: [T], nonzero where the token counts.
        trajectory_index: [T] int, equal for all tokens of one trajectory.
        n_global: trajectories of the batch, those without a token under mask 1 included.
    Returns: NaN if no token is under mask 1.
    """
    on = mask != 0
    if not on.any():
        return float("nan")
    _, trajectory = np.unique(trajectory_index[on], return_inverse=True)
    means = np.bincount(trajectory, weights=values[on].astype(np.float64)) / np.bincount(trajectory)
    return float(means.sum() / n_global)


def log_prob_abs_diff(
    train_log_probs: npt.NDArray[Any],
    rollout_log_probs: npt.NDArray[Any],
    mask: npt.NDArray[Any],
    trajectory_index: npt.NDArray[Any],
    n_global: int,
) -> LogProbDiff:
    """|trainer log-prob - engine log-prob| of the tokens under mask 1, summarised.

    mean = sum over trajectories of (sum of differences / number of tokens, siblings pooled) / n_global. Data-parallel
    ranks gather their tokens (all four columns, in any order) and call this once.

    Args:
        train_log_probs, rollout_log_probs: [T] float, natural log. Values under mask 0 may be NaN and do not count.
        mask: [T], nonzero where the policy sampled the token and it is trained on.
        trajectory_index: [T] int, equal for all tokens of one trajectory.
        n_global: trajectories of the batch.

    Returns: the three figures. All NaN if no token is under mask 1: nothing was compared. NaN under mask 1 shows.
    Raises: ValueError if the shapes differ or n_global is not positive.
    """
    columns = (train_log_probs, rollout_log_probs, mask, trajectory_index)
    if len({c.shape for c in columns}) != 1 or mask.ndim != 1:
        raise ValueError(f"the four columns must be [T] alike, got {[c.shape for c in columns]}")
    if n_global <= 0:
        raise ValueError(f"n_global is {n_global}; it is the number of trajectories of the batch")
    on = mask != 0
    if not on.any():
        return LogProbDiff(np.nan, np.nan, np.nan)
    diff = np.abs(train_log_probs.astype(np.float64) - rollout_log_probs.astype(np.float64))
    mean = trajectory_mean(diff, mask, trajectory_index, n_global)
    return LogProbDiff(mean, float(np.percentile(diff[on], 99)), float(diff[on].max()))


class RatioFigures(NamedTuple):
    """Of r = exp(trainer log-prob - engine log-prob), the importance ratio."""

    k3_kl: float
    """Nats: r - 1 - ln r, an estimate of KL(engine || trainer); averaged as `LogProbDiff.mean`."""
    ratio: float
    """Averaged alike; 1 in expectation, whatever the two policies are."""
    ess: float
    """Effective sample size of the tokens, as a share of them: (sum r)^2 / (n sum r^2), from 1 / n to 1."""
    sequence_ess: float
    """The same of sequences, each with the product of its tokens' ratios."""


def ratio_figures(
    train_log_probs: npt.NDArray[Any],
    rollout_log_probs: npt.NDArray[Any],
    mask: npt.NDArray[Any],
    trajectory_index: npt.NDArray[Any],
    sequence_index: npt.NDArray[Any],
    n_global: int,
) -> RatioFigures:
    """What the difference of trainer and engine does to importance sampling, over the tokens under mask 1.

    Args: the columns and n_global as `log_prob_abs_diff` takes them; sequence_index: [T] int, equal for all tokens of
        one sample.

    Returns: the four figures, exact over all the tokens, in float64; NaN if no token is under mask 1.
    Source: k3: J. Schulman, "Approximating KL divergence" (2020); effective sample size: A. Kong (1992).
    """
    on = mask != 0
    if not on.any():
        return RatioFigures(np.nan, np.nan, np.nan, np.nan)
    d = np.where(on, train_log_probs.astype(np.float64) - rollout_log_probs.astype(np.float64), 0.0)
    d = np.minimum(d, _LARGEST)
    _, sequence = np.unique(sequence_index[on], return_inverse=True)
    return RatioFigures(
        k3_kl=trajectory_mean(np.expm1(d) - d, mask, trajectory_index, n_global),
        ratio=trajectory_mean(np.exp(d), mask, trajectory_index, n_global),
        ess=_effective_share(d[on]),
        sequence_ess=_effective_share(np.bincount(sequence, weights=d[on]).astype(np.float64)),
    )


def _effective_share(log_weights: npt.NDArray[np.float64]) -> float:
    """(sum w)^2 / (n sum w^2); it does not change when all weights are scaled, so the largest is made 1."""
    w = np.exp(log_weights - log_weights.max())
    return float(w.sum() ** 2 / (len(w) * (w**2).sum()))
