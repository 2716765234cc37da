"""Samples as columns: what training knows of each sample and of each token, before any normalisation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from vime.config.hooks import UserFunction
from vime.config.ranges import MAX_REWARD
from vime.errors import DataError
from vime.types import Metrics, RoutedExperts, Sample, SampleStatus, SamplingSupport

PER_SAMPLE: Mapping[str, type[np.generic]] = {
    "lengths": np.int64,
    "rewards": np.float64,
    "group_ids": np.int64,
    "trajectory_ids": np.int64,
    "truncated": np.bool_,
}
PER_TOKEN: Mapping[str, type[np.generic]] = {
    "tokens": np.int32,
    "loss_mask": np.uint8,
    "rollout_log_probs": np.float32,
}


def sample_columns(
    samples: Sequence[Sample], reward_key: str | None, *, needs_reward: bool = True
) -> dict[str, npt.NDArray[Any]]:
    """The columns of a rollout's samples, [B] or [T] with T the sum of their lengths.

    tokens [T]; loss_mask [T], 0 over prompts and samples marked by `remove_sample`; rollout_log_probs [T], NaN under
    mask 0; lengths [B] of prompt and response; rewards [B], the entry `reward_key` of dict rewards, NaN where there is
    none and none is needed; group_ids, trajectory_ids, truncated [B].

    Raises: DataError naming the sample for a missing, NaN or ambiguous reward.
    """
    lengths = np.fromiter((len(s.tokens) for s in samples), np.int64, len(samples))
    tokens, mask, log_probs = _token_columns(samples, lengths)
    return {
        "tokens": tokens,
        "loss_mask": mask,
        "rollout_log_probs": log_probs,
        "lengths": lengths,
        "rewards": np.array([_scalar_reward(s, reward_key, required=needs_reward) for s in samples], np.float64),
        "group_ids": np.fromiter((s.group_id for s in samples), np.int64, len(samples)),
        "trajectory_ids": np.fromiter((s.trajectory_id for s in samples), np.int64, len(samples)),
        "truncated": np.array([s.status == SampleStatus.TRUNCATED for s in samples]),
    }


def teacher_column(samples: Sequence[Sample], mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32] | None:
    """[T] the log-probs of a teacher that was asked, NaN under mask 0; None where none was.

    Raises: DataError naming the sample that has none, or one that is not finite at a token under mask 1.
    """
    if all(s.teacher_log_probs is None for s in samples):
        return None
    column, end = np.full(len(mask), np.nan, np.float32), 0
    for s in samples:
        end += len(s.tokens)
        response = slice(end - s.response_length, end)
        if s.teacher_log_probs is not None:
            if len(s.teacher_log_probs) != s.response_length:
                raise DataError(
                    f"{sample_name(s)} has {len(s.teacher_log_probs)} teacher_log_probs for {s.response_length} tokens"
                )
            column[response] = s.teacher_log_probs
        if not np.isfinite(column[response][mask[response] != 0]).all():
            raise DataError(f"{sample_name(s)} has a trainable token without a finite log-prob of the teacher")
    column[mask == 0] = np.nan
    return column


def version_column(samples: Sequence[Sample], num_tokens: int) -> npt.NDArray[np.int64]:
    """[T] the version of the policy that sampled each token; -1 where none is known."""
    column, end = np.full(num_tokens, -1, np.int64), 0
    for s in samples:
        end += len(s.tokens)
        begin = end - s.response_length
        for span in s.weight_versions:
            column[begin + span.start : begin + span.end] = span.version
    return column


def checked_columns(function: UserFunction, result: Any) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """What --custom-convert-samples-to-train-data-path returned: the known columns, and further ones, [B] or [T].

    Raises: HookError naming the column that is missing or has another shape or type.
    """
    if not isinstance(result, Mapping):
        raise function.refuse(result, "a dict of columns, as vime.loop.columns.sample_columns gives")
    known = {**PER_SAMPLE, **PER_TOKEN}
    if missing := [name for name in known if name not in result]:
        raise function.broken(f"left out the columns {', '.join(missing)}; begin with vime.loop.columns.sample_columns")
    columns = {name: _array(function, name, result[name]) for name in result}
    lengths = columns["lengths"]
    if lengths.ndim != 1 or not len(lengths) or lengths.dtype.kind not in "iu" or lengths.min() < 1:
        raise function.broken("gave the column lengths something else than the tokens of each sample, 1 or more")
    b, t = len(lengths), int(lengths.sum())
    for name, column in columns.items():
        expected = {(b,)} if name in PER_SAMPLE else {(t,)} if name in PER_TOKEN else {(b,), (t,)}
        if column.shape not in expected:
            raise function.broken(
                f"gave the column {name} the shape {column.shape}; {b} samples of {t} tokens need "
                f"{' or '.join(map(str, sorted(expected)))}"
            )
    for name, dtype in known.items():
        try:
            columns[name] = columns[name].astype(dtype, casting="same_kind")
        except TypeError as error:
            raise function.broken(
                f"gave the column {name} the type {columns[name].dtype}, not {dtype.__name__}"
            ) from error
    if set(np.unique(columns["loss_mask"])) - {0, 1}:
        raise function.broken("gave the column loss_mask something else than 0 and 1")
    if columns["loss_mask"][np.cumsum(lengths) - lengths].any():
        raise function.broken("left loss_mask 1 at the first token of a sample, which nothing predicts")
    return {name: columns.pop(name) for name in known}, columns


def _array(function: UserFunction, name: str, value: Any) -> npt.NDArray[Any]:
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise function.broken(f"gave the column {name} the type {array.dtype}; numbers are expected")
    if PER_TOKEN.get(name) is np.uint8 and array.dtype.kind in "bi":
        return array.astype(np.uint8)
    return array


def _token_columns(
    samples: Sequence[Sample], lengths: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """tokens, loss_mask, rollout_log_probs, each [T]."""
    total = int(lengths.sum())
    tokens = np.fromiter(chain.from_iterable(s.tokens for s in samples), np.int32, total)
    mask = np.zeros(total, np.uint8)
    log_probs = np.full(total, np.nan, np.float32)
    r = np.fromiter((s.response_length for s in samples), np.int64, len(samples))
    is_response = np.arange(total) >= np.repeat(np.cumsum(lengths) - r, lengths)
    num_response = int(r.sum())
    mask[is_response] = np.fromiter(chain.from_iterable(s.loss_mask for s in samples), np.uint8, num_response)
    log_probs[is_response] = np.fromiter(
        chain.from_iterable(s.rollout_log_probs for s in samples), np.float32, num_response
    )
    removed = np.array([s.remove_sample for s in samples], np.bool_)
    mask[np.repeat(removed, lengths)] = 0
    log_probs[mask == 0] = np.nan
    return tokens, mask, log_probs


def support_columns(samples: Sequence[Sample], *, needed: bool) -> SamplingSupport | None:
    """[T] what could have been sampled in the place of each of the samples' tokens; None: the whole vocabulary.

    Args: needed: the run samples from a part of the vocabulary, so that every trainable token must say from which.
    Raises: DataError naming the sample with a token that does not.
    """
    if needed:
        for s in samples:
            known = np.zeros(s.response_length, np.bool_) if s.support is None else s.support.counts > 0
            if not s.remove_sample and (np.array(s.loss_mask, np.bool_) & ~known).any():
                raise DataError(
                    f"{sample_name(s)} has a trainable token that does not say what could have been sampled in its "
                    "place, and --rollout-top-k leaves a part of the vocabulary; generate functions hand "
                    "support=answer.support to append_response"
                )
    return SamplingSupport.joined(
        [part for s in samples for part in ((len(s.tokens) - s.response_length, None), (s.response_length, s.support))]
    )


def routed_columns(
    samples: Sequence[Sample], tokens: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64]
) -> RoutedExperts | None:
    """The experts that engines used for the samples' tokens, a prefix of each; None if they are known of none.

    Args: tokens, lengths: [T] and [B] of the batch, which must be those of the samples.
    Raises: DataError if they are not, so that rows would be of other tokens, or if samples' rows differ in shape.
    """
    check_own_tokens(samples, tokens, lengths, "whose experts --use-rollout-routing-replay replays")
    rows = [s.routed_experts for s in samples if s.routed_experts is not None]
    if not rows:
        return None
    if len(kinds := {(r.dtype.str, *r.shape[1:]) for r in rows}) > 1:
        raise DataError(f"samples have routed experts of several kinds (type, layers, top_k): {sorted(kinds)}")
    known = np.fromiter((s.num_routed for s in samples), np.int64, len(samples))
    return RoutedExperts(np.concatenate(rows), known)


def check_own_tokens(
    samples: Sequence[Sample], tokens: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64], why: str
) -> None:
    """Args: tokens, lengths: [T] and [B] of a batch. why: they must be the samples' own. Raises: DataError."""
    own = np.fromiter(chain.from_iterable(s.tokens for s in samples), np.int32)
    if not np.array_equal([len(s.tokens) for s in samples], lengths) or not np.array_equal(own, tokens):
        raise DataError(
            "--custom-convert-samples-to-train-data-path made other tokens than the samples have, "
            f"{why}; leave the tokens as they are, or drop one of the two"
        )


def routing_metrics(routed: RoutedExperts | None, lengths: npt.NDArray[np.int64]) -> Metrics:
    """How many of the tokens that matter (of each sample all but the last) have no row and are routed freely."""
    needed = int((lengths - 1).sum())
    missing = needed - (0 if routed is None else int(np.minimum(routed.known, lengths - 1).sum()))
    return {
        "train/routing_replay_missing": float(missing),
        "train/routing_replay_missing_share": missing / max(needed, 1),
    }


def _scalar_reward(s: Sample, key: str | None, *, required: bool) -> float:
    """The number to train on; NaN where there is none and none is required."""
    value = s.reward
    if isinstance(value, dict):
        if key is None:
            raise DataError(f"{sample_name(s)} has a dict reward with {sorted(value)}; choose one by --reward-key")
        if key not in value:
            raise DataError(f"{sample_name(s)} has no reward {key!r} (--reward-key); it has {sorted(value)}")
        value = value[key]
    if value is None:
        if required:
            raise DataError(f"{sample_name(s)} has no reward; the rollout function must score every sample")
        return math.nan
    reward = float(value)
    if not abs(reward) <= MAX_REWARD:
        raise DataError(f"{sample_name(s)} has the reward {reward}; rewards must be finite, up to {MAX_REWARD:g}")
    return reward


def sample_name(s: Sample) -> str:
    """How errors speak of it."""
    return f"sample {s.sample_id} of group {s.group_id}"
