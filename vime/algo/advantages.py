"""Advantages from the rewards of a group of trajectories that share a prompt."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]
STD_EPS = 1e-6  # as in verl and slime; TRL adds 1e-4, OpenRLHF 1e-9


def group_advantages(
    rewards: npt.ArrayLike,
    group_ids: npt.ArrayLike,
    trajectory_ids: npt.ArrayLike | None = None,
    *,
    std_eps: float | None = STD_EPS,
) -> FloatArray:
    """Centre each reward on its group's mean, and divide by the group's std + std_eps unless that is None.

    A = (R - mean) / (std + std_eps), with the sample std (n - 1), over the distinct trajectories of the group.

    Args:
        rewards: [B] float, one scalar per sample, in the reward's own unit.
        group_ids: [B] int, equal for the samples of one prompt. Groups may differ in size and be interleaved.
        trajectory_ids: [B] int, equal for siblings (samples split from one episode), which count once. None: every
            sample is its own trajectory.
        std_eps: added to the std. None only centres (Dr. GRPO).

    Returns: [B] float64. A group with a single trajectory gets 0, and so does one whose rewards are all equal.
    Raises: ValueError if the lengths differ, a reward is not finite, or siblings differ in group or reward.
    Source: GRPO, arXiv:2402.03300, section 4.1.2; without the std, Dr. GRPO, arXiv:2503.20783.
    """
    r = np.asarray(rewards, dtype=np.float64)
    groups = np.asarray(group_ids)
    trajectories = np.arange(len(r)) if trajectory_ids is None else np.asarray(trajectory_ids)
    if not (r.ndim == 1 and r.shape == groups.shape == trajectories.shape):
        raise ValueError(
            f"rewards, group_ids and trajectory_ids must be [B]: {r.shape}, {groups.shape}, {trajectories.shape}"
        )
    if not np.isfinite(r).all():
        bad = int(np.flatnonzero(~np.isfinite(r))[0])
        raise ValueError(f"the reward of sample {bad} is {r[bad]}; every reward must be finite")
    _, first, trajectory = np.unique(trajectories, return_index=True, return_inverse=True)
    _check_siblings(r, groups, trajectories, first[trajectory])

    values = r[first]  # one per trajectory
    _, group = np.unique(groups[first], return_inverse=True)
    size = np.bincount(group)
    mean = np.bincount(group, weights=values) / np.maximum(size, 1)
    centred = values - mean[group]
    # A mean of equal numbers may be off in the last place; such a group must get exactly 0, not noise over eps.
    low, high = np.full(len(size), np.inf), np.full(len(size), -np.inf)
    np.minimum.at(low, group, values)
    np.maximum.at(high, group, values)
    centred[(low == high)[group]] = 0.0
    if std_eps is not None:
        variance = np.bincount(group, weights=centred**2) / np.maximum(size - 1, 1)
        scale = np.sqrt(variance) + std_eps
        centred = np.divide(centred, scale[group], out=np.zeros_like(centred), where=scale[group] > 0)
    result: FloatArray = centred[trajectory]
    return result


def _check_siblings(
    rewards: FloatArray, groups: npt.NDArray[Any], trajectories: npt.NDArray[Any], first: npt.NDArray[np.intp]
) -> None:
    """`first` [B] is each sample's first sibling. Raises ValueError when siblings differ in group or reward."""
    for name, column in (("group", groups), ("reward", rewards)):
        if (column != column[first]).any():
            i = int(np.flatnonzero(column != column[first])[0])
            raise ValueError(
                f"samples {first[i]} and {i} belong to trajectory {trajectories[i]} but their {name}s are "
                f"{column[first[i]]} and {column[i]}; siblings share one {name}"
            )


Estimator: TypeAlias = Callable[..., FloatArray]
"""(rewards [B], group_ids [B], trajectory_ids [B], *, std_eps: float | None) -> advantages [B]"""

ESTIMATORS: MappingProxyType[str, Estimator] = MappingProxyType({"grpo": group_advantages})
"""--advantage-estimator by name."""
