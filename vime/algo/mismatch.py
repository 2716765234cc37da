"""How far the trainer's log-probs are from the engine's, on the same tokens under the same weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


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
