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
from vime.trainer.critic_columns import CriticTargets, Values
from vime.trainer.megatron.critic import Critic
from vime.trainer.megatron.losses.kl_in_reward import token_kl
from vime.types import METRIC_WEIGHTS, RETURNS, SHAPED_REWARDS, TOKEN_ADVANTAGES, VALUES, Metrics, TrainBatch


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
    """What PPO adds to the training of a rollout, wherever the critic is."""

    def __init__(self, config: Config) -> None:
        self._algo, self._settings = config.algo, config.critic

    def trains_policy(self, batch: TrainBatch) -> bool:
        """Whether the policy is trained on this rollout, or the critic alone."""
        return batch.rollout_id >= self._settings.num_critic_only_steps

    def with_advantages(
        self,
        batch: TrainBatch,
        values: Values,
        old: npt.NDArray[np.float32] | None,
        reference: npt.NDArray[np.float32] | None,
    ) -> tuple[TrainBatch, Metrics]:
        """The batch with the columns that `with_advantages` below makes of the critic's values.

        Args:
            values: as `critic_values` gives them for this batch.
            old, reference: [T] log-probs, where the KL is in the reward.
        """
        kl: npt.NDArray[np.float64] | None = None
        metrics: Metrics = {}
        if self._algo.kl_coef:
            assert old is not None and reference is not None, "--kl-coef needs both"
            kl, metrics = token_kl(batch, old, reference, self._algo)
        steps = steps_of_episodes(batch, self._settings)
        batch, of_values = with_advantages(batch, values, steps, kl, self._algo, self._settings)
        return batch, metrics | of_values


def critic_values(critic: Critic, batch: TrainBatch, settings: CriticConfig) -> Values:
    """The critic's values that advantages are made of: of episodes' steps, and behind those cut off. Collective."""
    return critic.values(batch, steps_of_episodes(batch, settings), cut_off_samples(batch, settings))


def all_but_first(batch: TrainBatch) -> npt.NDArray[np.bool_]:
    """[T] all tokens that something predicts."""
    wanted = np.ones(len(batch.tokens), dtype=np.bool_)
    wanted[batch.cu_seqlens[:-1]] = False
    return wanted


def targets_of(batch: TrainBatch) -> CriticTargets:
    """What a critic is to be trained on. Args: batch: with advantages."""
    return CriticTargets(
        rollout_id=batch.rollout_id,
        mask=batch.loss_mask,
        weights=batch.loss_weights,
        metric_weights=batch.extra.get(METRIC_WEIGHTS),
        values=batch.extra[VALUES],
        returns=batch.extra[RETURNS],
    )


def with_targets(batch: TrainBatch, targets: CriticTargets) -> TrainBatch:
    """The batch as a critic is trained on it, cut into micro-batches as it is. Raises: ValueError for another's."""
    if targets.rollout_id != batch.rollout_id or targets.mask.shape != batch.tokens.shape:
        raise ValueError(f"targets of rollout {targets.rollout_id} do not fit the batch of rollout {batch.rollout_id}")
    columns = {VALUES: targets.values, RETURNS: targets.returns}
    if targets.metric_weights is not None:
        columns[METRIC_WEIGHTS] = targets.metric_weights
    return replace(
        batch, loss_mask=targets.mask, loss_weights=targets.weights, extra={**batch.extra, **columns}, support=None
    )


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
