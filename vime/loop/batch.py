"""Groups to a TrainBatch: rewards, advantages, masks, loss weights and the plan of optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vime.batch_columns import POLICY_VERSIONS, TEACHER_LOG_PROBS
from vime.config import AlgoConfig, TrainConfig
from vime.config.parallel import ParallelSizes
from vime.data.packing import step_ids
from vime.errors import ConfigError, DataError
from vime.loop.batch_hooks import BatchHooks
from vime.loop.batch_plan import BatchPlanner
from vime.loop.columns import (
    check_own_tokens,
    routed_columns,
    routing_metrics,
    sample_columns,
    sample_name,
    support_columns,
    teacher_column,
    version_column,
)
from vime.loop.learning_signal import learning_signal, loss_weights
from vime.loop.staleness import are_older, version_after
from vime.models import ModelSettings
from vime.types import (
    PG_WEIGHTS,
    Group,
    Metrics,
    RoutedExperts,
    Sample,
    SampleStatus,
    SamplingSupport,
    TrainBatch,
)


def make_train_batch(
    groups: Sequence[Group],
    *,
    rollout_id: int,
    algo: AlgoConfig,
    train: TrainConfig,
    dp_size: int,
    reward_key: str | None,
    global_batch_size: int,
    sizes: ParallelSizes = ParallelSizes(),  # noqa: B008 - frozen
    model: ModelSettings | None = None,
    hooks: BatchHooks | None = None,
    max_response_len: int | None = None,
    needs_support: bool = False,
    mixes_versions: bool = False,
) -> tuple[TrainBatch, Metrics]:
    """Flatten a rollout into columns, ready to pack.

    Args:
        groups: finished groups of any sizes, in the order they are to be trained on.
        rollout_id: their number.
        algo: loss, advantage estimator and its normalisation.
        train: batching of micro-batches.
        dp_size: data-parallel ranks.
        reward_key: the entry of a dict reward to train on.
        global_batch_size: trajectories per optimizer step, the constant the loss is averaged over.
        sizes: of the parallel dimensions. Context-parallel ranks share a micro-batch's tokens, so it may have that
            many times more.
        model: whose FLOPs balance the ranks; None: tokens do.
        hooks: the run's own functions for columns, rewards and reduction.
        max_response_len: tokens a response may have; for --overlong-buffer-len.
        needs_support: the run samples from a part of the vocabulary.
        mixes_versions: one token of an earlier version makes the rollout one of earlier versions; else all are.

    Returns: the batch and the rollout/* metrics that come from it. A fully masked sample stays, with weight 0. With
        sft_loss the advantages are 0 and a missing reward is NaN. With --kl-coef they are 0 until the trainer, which
        knows the KL, makes them.
    Raises: DataError naming the sample: an empty batch; a sample that failed or was never generated; a missing, NaN or
        ambiguous reward, or a token that is trainable but has no rollout log-prob (policy_loss only); a sample too
        long for a micro-batch. ConfigError on an estimator or loss type this function does not know.
    """
    if algo.loss_type not in ("policy_loss", "sft_loss", "custom_loss"):
        raise ConfigError(f"--loss-type is {algo.loss_type!r}; known are policy_loss, sft_loss and custom_loss")
    is_policy = algo.loss_type != "sft_loss"
    samples = _checked_samples(groups, rollout_id, is_policy)
    converted = hooks.columns(samples) if hooks is not None else None
    columns, extra = converted or (sample_columns(samples, reward_key, needs_reward=is_policy), {})
    lengths, mask, rewards = columns["lengths"], columns["loss_mask"], columns["rewards"]
    cu_seqlens = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    group_ids, trajectory_ids = columns["group_ids"], columns["trajectory_ids"]

    planner = BatchPlanner(train=train, dp_size=dp_size, sizes=sizes, model=model, global_batch_size=global_batch_size)
    steps = planner.plan(lengths, mask, cu_seqlens, trajectory_ids)
    metrics: Metrics = {}
    advantages: npt.NDArray[np.float64] | None = None
    if is_policy:
        names = [sample_name(s) for s in samples] if converted is None else [f"row {i}" for i in range(len(lengths))]
        _check_log_probs(names, mask, columns["rollout_log_probs"], cu_seqlens)
        rewards, advantages, more, metrics = learning_signal(
            samples, columns, cu_seqlens, algo, hooks=hooks, max_response_len=max_response_len
        )
        extra |= more
        if converted is None:
            extra |= _columns_of_others(samples, mask, algo)
    routed, support, of_routing = _told_by_engines(
        samples, columns, replays=train.use_rollout_routing_replay, needs_support=needs_support and is_policy
    )
    metrics |= of_routing
    ids = step_ids(steps, len(lengths))
    weights, more = loss_weights(mask, cu_seqlens, trajectory_ids, ids, algo, global_batch_size)
    extra |= more
    if is_policy and hooks is not None:
        pg_weights = hooks.pg_weights(mask, cu_seqlens, trajectory_ids, global_batch_size)
        extra |= {} if pg_weights is None else {PG_WEIGHTS: pg_weights}
    batch = TrainBatch(
        rollout_id=rollout_id,
        tokens=columns["tokens"],
        cu_seqlens=cu_seqlens,
        loss_mask=mask,
        rollout_log_probs=columns["rollout_log_probs"],
        loss_weights=weights,
        advantages=np.zeros(len(lengths), np.float32) if advantages is None else advantages.astype(np.float32),
        rewards=rewards.astype(np.float32),
        group_ids=group_ids,
        trajectory_ids=trajectory_ids,
        steps=steps,
        global_batch_size=global_batch_size,
        truncated=columns["truncated"],
        extra=extra,
        is_older=is_policy and are_older(samples, version_after(rollout_id - 1), any_of_them=mixes_versions),
        routed_experts=routed,
        support=support,
    )
    metrics |= _metrics(batch, rewards, advantages, is_policy=is_policy)
    return batch, metrics


def _told_by_engines(
    samples: Sequence[Sample], columns: Mapping[str, npt.NDArray[Any]], *, replays: bool, needs_support: bool
) -> tuple[RoutedExperts | None, SamplingSupport | None, Metrics]:
    """The experts of each token, where they are replayed; what could have been sampled in its place; what there is to
    report. The columns' tokens must then be the samples' own."""
    tokens, lengths = columns["tokens"], columns["lengths"]
    routed = routed_columns(samples, tokens, lengths) if replays else None
    if (support := support_columns(samples, needed=needs_support)) is not None:
        check_own_tokens(samples, tokens, lengths, "for which engines told what they could have sampled")
    return routed, support, routing_metrics(routed, lengths) if replays else {}


def _columns_of_others(
    samples: Sequence[Sample], mask: npt.NDArray[np.uint8], algo: AlgoConfig
) -> dict[str, npt.NDArray[Any]]:
    """What the loss needs to know of policies other than the one that is trained."""
    columns: dict[str, npt.NDArray[Any]] = {}
    if algo.use_opd and (teacher := teacher_column(samples, mask)) is not None:
        columns[TEACHER_LOG_PROBS] = teacher
    if algo.keep_old_actor:
        columns[POLICY_VERSIONS] = version_column(samples, len(mask))
    return columns


def _checked_samples(groups: Sequence[Group], rollout_id: int, is_policy: bool) -> list[Sample]:
    samples = [s for g in groups for s in g.samples]
    if not samples:
        raise DataError(f"rollout {rollout_id} holds no samples; the rollout function returned {len(groups)} groups")
    for s in samples:
        _check_sample(s, is_policy)
    return samples


def _check_sample(s: Sample, is_policy: bool) -> None:
    if s.status in (SampleStatus.PENDING, SampleStatus.FAILED):
        why = f" ({s.metadata['error']})" if "error" in s.metadata else ""
        raise DataError(f"{sample_name(s)} is {s.status}{why}; the rollout function must finish or replace it")
    if not s.tokens:
        raise DataError(f"{sample_name(s)} has no tokens")
    if s.trajectory_id < 0:
        raise DataError(f"{sample_name(s)} has trajectory_id {s.trajectory_id}; give every episode its own from 0")
    if s.response_length == len(s.tokens) and s.loss_mask[0]:
        raise DataError(f"{sample_name(s)} has no prompt, so nothing predicts its first token; mask that token out")


def _check_log_probs(
    names: Sequence[str],
    mask: npt.NDArray[np.uint8],
    log_probs: npt.NDArray[np.float32],
    cu_seqlens: npt.NDArray[np.int64],
) -> None:
    missing = np.flatnonzero((mask != 0) & ~np.isfinite(log_probs))
    if len(missing):
        name = names[int(np.searchsorted(cu_seqlens, missing[0], side="right")) - 1]
        raise DataError(
            f"{name} has a trainable token without a rollout log-prob ({len(missing)} in the batch); "
            f"supervised tokens are for --loss-type sft_loss, and masked tokens need loss_mask 0"
        )


def _metrics(
    batch: TrainBatch, rewards: npt.NDArray[np.float64], advantages: npt.NDArray[np.float64] | None, *, is_policy: bool
) -> Metrics:
    """What the batch says of the rollout; over trajectories, siblings once. Definitions: observability/metrics.py."""
    _, first = np.unique(batch.trajectory_ids, return_index=True)
    masked = np.add.reduceat(batch.loss_mask.astype(np.int64), batch.cu_seqlens[:-1]) == 0
    metrics = {
        "rollout/total_lengths": float(batch.lengths.mean()),
        "rollout/truncated": float(batch.truncated[first].mean()),
        "rollout/masked_ratio": float(masked.mean()),
    }
    if not is_policy:
        return metrics
    values, groups = rewards[first], batch.group_ids[first]
    _, group, size = np.unique(groups, return_inverse=True, return_counts=True)
    low, high = np.full(len(size), np.inf), np.full(len(size), -np.inf)
    np.minimum.at(low, group, values)
    np.maximum.at(high, group, values)
    summarised = {"raw_reward": values} | ({} if advantages is None else {"advantages": advantages[first]})
    for name, column in summarised.items():
        metrics[f"rollout/{name}"] = float(column.mean())
        metrics[f"rollout/{name}/min"] = float(column.min())
        metrics[f"rollout/{name}/max"] = float(column.max())
    if advantages is not None:
        metrics["rollout/rewards"] = metrics["rollout/advantages"]
    metrics["rollout/zero_std"] = float((low == high).mean())
    return metrics
