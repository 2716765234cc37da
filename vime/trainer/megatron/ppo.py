"""PPO's part of a rollout on a training rank: values, then advantages and returns of all its tokens.

Every rank has the whole rollout's values and log-probs, so each computes the same advantages, and whitening is over
the global batch whatever the layout.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from vime.algo.advantages import AdvantageInputs
from vime.algo.explained_variance import explained_variance
from vime.algo.gae import gae
from vime.algo.reinforce_pp import token_rewards
from vime.algo.whiten import whiten
from vime.config import AlgoConfig, Config, CriticConfig
from vime.config.estimators import whitens
from vime.trainer.megatron.critic import Critic, Values
from vime.trainer.megatron.kl_in_reward import token_kl
from vime.types import RETURNS, SHAPED_REWARDS, TOKEN_ADVANTAGES, VALUES, Metrics, TrainBatch


def steps_of_episodes(batch: TrainBatch, critic: CriticConfig) -> npt.NDArray[np.bool_]:
    """[T] the tokens that GAE takes as steps: under mask 1; with --gae-masked-tokens all, from the first of them on."""
    mask = batch.loss_mask.astype(np.bool_)
    if critic.gae_masked_tokens != "all":
        return mask
    begun = np.cumsum(mask)
    before = np.repeat(np.concatenate([[0], begun])[batch.cu_seqlens[:-1]], batch.lengths)
    return begun > before


def cut_off_samples(batch: TrainBatch, critic: CriticConfig) -> npt.NDArray[np.bool_]:
    """[B] the samples whose episode goes on behind their last token, as far as the critic can know."""
    if critic.disable_truncation_bootstrap:
        return np.zeros(batch.num_samples, np.bool_)
    return batch.truncated & (np.add.reduceat(batch.loss_mask, batch.cu_seqlens[:-1], dtype=np.int64) > 0)


class Ppo:
    """What PPO adds to the training of a rollout; the trainer calls `with_advantages`, then the critic's `train`."""

    def __init__(self, config: Config, critic: Critic) -> None:
        self.critic = critic
        self._algo, self._settings = config.algo, config.critic

    def trains_policy(self, batch: TrainBatch) -> bool:
        """Whether the policy is trained on this rollout, or the critic alone."""
        return batch.rollout_id >= self._settings.num_critic_only_steps

    def with_advantages(
        self, batch: TrainBatch, old: npt.NDArray[np.float32] | None, reference: npt.NDArray[np.float32] | None
    ) -> tuple[TrainBatch, Metrics]:
        """The batch with the columns that `with_advantages` below makes of the critic's values. Collective.

        Args: old, reference: [T] log-probs, where the KL is in the reward.
        """
        kl: npt.NDArray[np.float64] | None = None
        metrics: Metrics = {}
        if self._algo.kl_coef:
            assert old is not None and reference is not None, "--kl-coef needs both"
            kl, metrics = token_kl(batch, old, reference, self._algo)
        steps, cut_off = steps_of_episodes(batch, self._settings), cut_off_samples(batch, self._settings)
        values = self.critic.values(batch, steps, cut_off)
        batch, of_values = with_advantages(batch, values, steps, kl, self._algo, self._settings)
        return batch, metrics | of_values


def with_advantages(
    batch: TrainBatch,
    values: Values,
    steps: npt.NDArray[np.bool_],
    kl: npt.NDArray[np.float64] | None,
    algo: AlgoConfig,
    critic: CriticConfig,
) -> tuple[TrainBatch, Metrics]:
    """The batch with its tokens' advantages, old values and returns, and what is logged of them.

    Args:
        values: of `steps` and of the states behind samples that were cut off.
        steps: [T] the tokens that are steps of episodes.
        kl: [T] what each token's reward pays for, times --kl-coef; None: it pays for nothing.
    """
    mask = batch.loss_mask.astype(np.bool_)
    inputs = AdvantageInputs(
        rewards=batch.extra.get(SHAPED_REWARDS, batch.rewards).astype(np.float64),
        group_ids=batch.group_ids,
        trajectory_ids=batch.trajectory_ids,
        cu_seqlens=batch.cu_seqlens,
        mask=mask,
        token_penalties=None if kl is None else algo.kl_coef * kl,
    )
    advantages, returns = gae(
        token_rewards(inputs),
        values.of_tokens,
        steps,
        batch.cu_seqlens,
        values.at_end,
        gamma=algo.gamma,
        lam=critic.lambd,
        masked="zero" if critic.gae_masked_tokens == "zero" else "skip",
    )
    metrics = {"rollout/values": _mean(values.of_tokens, mask), "rollout/returns": _mean(returns, mask)}
    if math.isfinite(explained := explained_variance(values.of_tokens, returns, mask)):
        metrics["train/critic-explained_variance"] = explained
    if whitens(algo):
        advantages = whiten(advantages, mask)
    if mask.any():
        chosen = advantages[mask]
        metrics["rollout/advantages"] = float(chosen.mean())
        metrics |= {f"rollout/advantages/{name}": float(getattr(chosen, name)()) for name in ("min", "max", "std")}
    columns = {
        TOKEN_ADVANTAGES: _column(advantages, mask),
        VALUES: _column(values.of_tokens, mask),
        RETURNS: _column(returns, mask),
    }
    return replace(batch, extra={**batch.extra, **columns}), metrics


def _mean(values: npt.NDArray[np.floating], mask: npt.NDArray[np.bool_]) -> float:
    return float(values[mask].astype(np.float64).mean()) if mask.any() else float("nan")


def _column(values: npt.NDArray[np.floating], mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
    """For the batch: 0 where nothing is learnt."""
    return np.where(mask, values, 0.0).astype(np.float32)
