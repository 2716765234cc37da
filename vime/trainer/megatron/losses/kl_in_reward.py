"""Advantages from rewards less the KL to the reference: made where both log-probs are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from vime.algo.advantages import STD_EPS, AdvantageInputs
from vime.algo.estimate import estimate
from vime.algo.kl import kl_estimate
from vime.algo.mismatch import trajectory_mean
from vime.config import AlgoConfig
from vime.config.estimators import kl_type, whitens
from vime.errors import TrainingError
from vime.types import SHAPED_REWARDS, TOKEN_ADVANTAGES, Metrics, TrainBatch


def with_advantages(
    batch: TrainBatch, old: npt.NDArray[np.float32], reference: npt.NDArray[np.float32], algo: AlgoConfig
) -> tuple[TrainBatch, Metrics]:
    """The batch with the advantages of --advantage-estimator under --kl-coef, and rollout/kl.

    Args: old, reference: [T] log-probs of the policy before the first step, and of the reference; the same on all
        ranks, which therefore come to the same advantages.
    Raises: TrainingError if a log-prob is not finite.
    """
    kl, metrics = token_kl(batch, old, reference, algo)
    inputs = AdvantageInputs(
        rewards=batch.extra.get(SHAPED_REWARDS, batch.rewards).astype(np.float64),
        group_ids=batch.group_ids,
        trajectory_ids=batch.trajectory_ids,
        cu_seqlens=batch.cu_seqlens,
        mask=batch.loss_mask,
        token_penalties=algo.kl_coef * kl,
        std_eps=None if algo.disable_grpo_std_normalization else STD_EPS,
        gamma=algo.gamma,
    )
    try:
        advantages = estimate(
            algo.advantage_estimator, inputs, raw=algo.disable_rewards_normalization, whitened=whitens(algo)
        )
    except ValueError as error:
        raise TrainingError(f"advantages of rollout {batch.rollout_id} cannot be computed: {error}") from error
    changed = replace(batch, advantages=advantages.per_sample.astype(np.float32))
    if advantages.per_token is not None:
        changed = replace(changed, extra={**batch.extra, TOKEN_ADVANTAGES: advantages.per_token.astype(np.float32)})
    return changed, metrics


def token_kl(
    batch: TrainBatch, old: npt.NDArray[np.float32], reference: npt.NDArray[np.float32], algo: AlgoConfig
) -> tuple[npt.NDArray[np.float64], Metrics]:
    """[T] the KL at each token, 0 under mask 0; and rollout/kl. Arguments as `with_advantages` takes them."""
    mask = batch.loss_mask != 0
    kl = np.zeros(len(mask))
    policy, other = (torch.from_numpy(column[mask].astype(np.float64)) for column in (old, reference))
    kl[mask] = kl_estimate(policy, other, kl_type(algo)).numpy()
    trajectories = np.repeat(batch.trajectory_ids, batch.lengths)
    mean = trajectory_mean(kl, mask, trajectories, len(np.unique(batch.trajectory_ids)))
    return kl, {"rollout/kl": mean}
