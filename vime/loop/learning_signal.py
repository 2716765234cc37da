"""What a rollout teaches: shaped rewards, advantages, and how much each token's loss weighs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vime.algo.advantages import STD_EPS, AdvantageInputs
from vime.algo.estimate import Advantages, estimate
from vime.algo.overlong import overlong_penalty
from vime.algo.reduce import aggregation_weights, token_loss_weights, token_mean_weights
from vime.config import AlgoConfig
from vime.config.estimators import CONSTANT_LENGTH, ESTIMATORS, TRAJECTORY_MEAN, loss_agg_mode, needs_critic, whitens
from vime.errors import ConfigError, DataError
from vime.loop.batch_hooks import BatchHooks
from vime.types import METRIC_WEIGHTS, SHAPED_REWARDS, TOKEN_ADVANTAGES, Metrics, Sample


class LearningSignal(NamedTuple):
    """Of a rollout of B samples."""

    rewards: npt.NDArray[np.float64]
    """[B] raw."""
    advantages: npt.NDArray[np.float64] | None
    """[B]; None where the trainer makes them, which knows the KL and a critic's values."""
    extra: dict[str, npt.NDArray[Any]]
    """Columns of the batch, by their names in vime.types."""
    metrics: Metrics


def learning_signal(
    samples: Sequence[Sample],
    columns: Mapping[str, npt.NDArray[Any]],
    cu_seqlens: npt.NDArray[np.int64],
    algo: AlgoConfig,
    *,
    hooks: BatchHooks | None,
    max_response_len: int | None,
) -> LearningSignal:
    """Rewards and advantages, by the run's own function where it has one.

    Args: columns: as `sample_columns` gives them. Others as `vime.loop.batch.make_train_batch` takes them.
    Raises: DataError if no advantage can be computed, ConfigError on settings that do not fit.
    """
    own = hooks.rewards(list(samples), num_rows=len(cu_seqlens) - 1) if hooks is not None else None
    if own is not None:
        rewards, shaped = own
        if needs_critic(algo):
            return LearningSignal(rewards, None, {SHAPED_REWARDS: shaped}, {})
        return LearningSignal(rewards, shaped, {}, {})
    rewards = columns["rewards"]
    shaped, extra = rewards, {}
    metrics: Metrics = {}
    if algo.overlong_buffer_len is not None:
        shaped, metrics = _shaped_rewards(samples, rewards, algo, max_response_len)
        extra[SHAPED_REWARDS] = shaped
    if algo.kl_coef or needs_critic(algo):
        return LearningSignal(rewards, None, extra, metrics)
    advantages = _advantages(shaped, columns, cu_seqlens, algo)
    if advantages.per_token is not None:
        extra[TOKEN_ADVANTAGES] = advantages.per_token.astype(np.float32)
    return LearningSignal(rewards, advantages.per_sample, extra, metrics)


def loss_weights(
    mask: npt.NDArray[np.uint8],
    cu_seqlens: npt.NDArray[np.int64],
    trajectory_ids: npt.NDArray[np.int64],
    step_ids: npt.NDArray[np.int64],
    algo: AlgoConfig,
    global_batch_size: int,
) -> tuple[npt.NDArray[np.float32], dict[str, npt.NDArray[Any]]]:
    """[T] what each token's loss is multiplied with, and the column METRIC_WEIGHTS where metrics need another.

    Args: step_ids: [B] the optimizer step of each sample.
    """
    if algo.loss_type == "sft_loss":
        return token_mean_weights(mask, cu_seqlens, step_ids).astype(np.float32), {}
    mode = loss_agg_mode(algo)
    if mode == CONSTANT_LENGTH and algo.loss_agg_length is None:
        raise ConfigError(f"--loss-agg-mode {mode} divides by --loss-agg-length; set that, too")
    weights = aggregation_weights(
        mode,
        mask,
        cu_seqlens,
        trajectory_ids=trajectory_ids,
        step_ids=step_ids,
        n_global=global_batch_size,
        length=algo.loss_agg_length or 1,
    )
    if mode == TRAJECTORY_MEAN:
        return weights.astype(np.float32), {}
    of_metrics = token_loss_weights(mask, cu_seqlens, trajectory_ids, global_batch_size)
    return weights.astype(np.float32), {METRIC_WEIGHTS: of_metrics.astype(np.float32)}


def _advantages(
    rewards: npt.NDArray[np.float64],
    columns: Mapping[str, npt.NDArray[Any]],
    cu_seqlens: npt.NDArray[np.int64],
    algo: AlgoConfig,
) -> Advantages:
    if algo.advantage_estimator not in ESTIMATORS:
        raise ConfigError(
            f"--advantage-estimator is {algo.advantage_estimator!r}; known are {', '.join(sorted(ESTIMATORS))}"
        )
    inputs = AdvantageInputs(
        rewards=rewards,
        group_ids=columns["group_ids"],
        trajectory_ids=columns["trajectory_ids"],
        cu_seqlens=cu_seqlens,
        mask=columns["loss_mask"],
        std_eps=None if algo.disable_grpo_std_normalization else STD_EPS,
        gamma=algo.gamma,
    )
    try:
        return estimate(
            algo.advantage_estimator, inputs, raw=algo.disable_rewards_normalization, whitened=whitens(algo)
        )
    except ValueError as e:
        raise DataError(f"advantages cannot be computed: {e}") from e


def _shaped_rewards(
    samples: Sequence[Sample], rewards: npt.NDArray[np.float64], algo: AlgoConfig, max_response_len: int | None
) -> tuple[npt.NDArray[np.float64], Metrics]:
    """[B] rewards with the overlong penalty of each trajectory's longest sample, so that siblings keep one reward."""
    if algo.overlong_buffer_len is None or max_response_len is None:
        raise ConfigError("--overlong-buffer-len needs the longest length of a response, --rollout-max-response-len")
    _, first, trajectory = np.unique([s.trajectory_id for s in samples], return_index=True, return_inverse=True)
    longest = np.zeros(len(first), np.int64)
    np.maximum.at(longest, trajectory, [s.response_length for s in samples])
    penalty = overlong_penalty(
        longest,
        max_length=max_response_len,
        buffer_length=algo.overlong_buffer_len,
        factor=algo.overlong_penalty_factor,
    )
    return rewards + penalty[trajectory], {"rollout/overlong_penalty": float(penalty.mean())}
