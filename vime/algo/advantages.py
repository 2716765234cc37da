"""Advantages from the rewards of a group of trajectories that share a prompt.

Each estimator is one function: `AdvantageInputs` in, an advantage for each sample [B] or each token [T] out. The table
in vime/config/estimators.py makes it a value of --advantage-estimator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]
STD_EPS = 1e-6  # as in verl and slime; TRL adds 1e-4, OpenRLHF 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """What an estimator may read of a rollout, and its settings."""

    rewards: FloatArray
    """[B] one scalar per sample, finite; siblings share it."""
    group_ids: npt.NDArray[np.int64]
    """[B] equal for the samples of one prompt. Groups may differ in size and be interleaved."""
    trajectory_ids: npt.NDArray[np.int64]
    """[B] equal for siblings, which count once."""
    cu_seqlens: npt.NDArray[np.int64]
    """[B + 1] sample i owns tokens [cu_seqlens[i], cu_seqlens[i + 1])."""
    mask: npt.NDArray[Any]
    """[T] nonzero where the policy sampled the token and it is trained on."""
    token_penalties: FloatArray | None = None
    """[T] taken from the reward at each token, 0 under mask 0: --kl-coef times the KL. None: nothing is."""
    std_eps: float | None = STD_EPS
    """Added to a group's std; None: grpo does not divide by it."""
    gamma: float = 1.0
    """Discount for each token."""

    def penalised_rewards(self) -> FloatArray:
        """[B] each trajectory's reward less the penalties of all its tokens, its siblings' included."""
        if self.token_penalties is None:
            return self.rewards
        _, trajectory = np.unique(self.trajectory_ids, return_inverse=True)
        penalties = np.where(self.mask != 0, self.token_penalties, 0.0)
        owner = np.repeat(trajectory, np.diff(self.cu_seqlens))
        total = np.bincount(owner, weights=penalties, minlength=len(trajectory))
        rewards: FloatArray = self.rewards - total[trajectory]
        return rewards


def grpo(inputs: AdvantageInputs) -> FloatArray:
    """Rewards centred on their group's mean and divided by its std + std_eps. [B]

    Source: GRPO, arXiv:2402.03300, section 4.1.2.
    """
    return group_advantages(inputs.penalised_rewards(), inputs.group_ids, inputs.trajectory_ids, std_eps=inputs.std_eps)


def dr_grpo(inputs: AdvantageInputs) -> FloatArray:
    """Rewards centred on their group's mean. [B]

    Source: Dr. GRPO, arXiv:2503.20783.
    """
    return group_advantages(inputs.penalised_rewards(), inputs.group_ids, inputs.trajectory_ids, std_eps=None)


def rloo(inputs: AdvantageInputs) -> FloatArray:
    """Rewards less the mean of the group's other trajectories: A = n / (n - 1) (R - mean). [B]

    A group with a single trajectory gets 0: there is no other to compare with.

    Source: RLOO, arXiv:2402.14740.
    """
    centred = dr_grpo(inputs)
    _, first = np.unique(inputs.trajectory_ids, return_index=True)
    _, group = np.unique(inputs.group_ids, return_inverse=True)
    n = np.bincount(group[first], minlength=int(group.max(initial=-1)) + 1)[group]
    advantages: FloatArray = centred * n / np.maximum(n - 1, 1)
    return advantages


def raw_rewards(inputs: AdvantageInputs) -> FloatArray:
    """The rewards as they are, less penalties (--disable-rewards-normalization). [B]"""
    return inputs.penalised_rewards().copy()


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
