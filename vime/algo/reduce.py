"""Aggregation of per-token losses: weights that turn every reduction into one plain sum.

loss = sum_t weights[t] * token_loss[t] over all tokens of an optimizer step. The weights are fixed when the batch is
made, from the whole step, so the sum does not care how the step is cut into micro-batches, packed or spread over ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def aggregation_weights(
    mode: str,
    mask: npt.NDArray[Any],
    cu_seqlens: npt.NDArray[Any],
    *,
    trajectory_ids: npt.NDArray[Any],
    step_ids: npt.NDArray[Any],
    n_global: int,
    length: float,
) -> npt.NDArray[np.float64]:
    """[T] the weights of a value of --loss-agg-mode; what each reads is said at the functions below.

    Args: length: the constant of seq-mean-token-sum-norm.
    Raises: ValueError on an unknown mode.
    """
    match mode:
        case "trajectory-mean":
            return token_loss_weights(mask, cu_seqlens, trajectory_ids, n_global)
        case "token-mean":
            return token_mean_weights(mask, cu_seqlens, step_ids)
        case "seq-mean-token-mean":
            return sequence_mean_weights(mask, cu_seqlens, step_ids)
        case "seq-mean-token-sum":
            return token_sum_weights(mask, cu_seqlens, n_global=n_global)
        case "seq-mean-token-sum-norm":
            return token_sum_weights(mask, cu_seqlens, n_global=n_global, length=length)
    raise ValueError(f"unknown aggregation {mode!r}")


def token_loss_weights(
    mask: npt.NDArray[Any], cu_seqlens: npt.NDArray[Any], trajectory_ids: npt.NDArray[Any], n_global: int
) -> npt.NDArray[np.float64]:
    """Weights of the default loss: token mean inside each trajectory, summed, divided by a constant.

    The tokens of siblings are pooled: w[t] = mask[t] / (tokens under mask 1 of the whole trajectory * n_global).

    Args:
        mask: [T], nonzero where a token gets gradient.
        cu_seqlens: [B + 1] int; sample i owns tokens [cu_seqlens[i], cu_seqlens[i + 1]).
        trajectory_ids: [B] int.
        n_global: trajectories per optimizer step; stays the divisor when some are missing or fully masked.

    Returns: [T] float64, 0 under mask 0. A trajectory without a token under mask 1 contributes nothing.
    Raises: ValueError if the shapes do not fit or n_global is not positive.
    """
    on = _checked_mask(mask, cu_seqlens, trajectory_ids)
    if n_global <= 0:
        raise ValueError(f"n_global is {n_global}; it is the number of trajectories of an optimizer step")
    _, trajectory = np.unique(trajectory_ids, return_inverse=True)
    weights: npt.NDArray[np.float64] = _pooled_weights(on, cu_seqlens, trajectory) / n_global
    return weights


def token_mean_weights(
    mask: npt.NDArray[Any], cu_seqlens: npt.NDArray[Any], step_ids: npt.NDArray[Any]
) -> npt.NDArray[np.float64]:
    """Weights of the token mean over an optimizer step (DAPO; supervised training).

    w[t] = mask[t] / (tokens under mask 1 of the sample's optimizer step).

    Args:
        mask: [T], nonzero where a token gets gradient.
        cu_seqlens: [B + 1] int.
        step_ids: [B] int, equal for samples of one optimizer step.

    Returns: [T] float64, 0 under mask 0.
    Raises: ValueError if the shapes do not fit.
    """
    on = _checked_mask(mask, cu_seqlens, step_ids)
    _, step = np.unique(step_ids, return_inverse=True)
    return _pooled_weights(on, cu_seqlens, step)


def sequence_mean_weights(
    mask: npt.NDArray[Any], cu_seqlens: npt.NDArray[Any], step_ids: npt.NDArray[Any], *, count_empty: bool = True
) -> npt.NDArray[np.float64]:
    """Weights of the token mean inside each sample, averaged over the samples of an optimizer step.

    w[t] = mask[t] / (tokens under mask 1 of the sample * samples of its step). Siblings count one by one.

    Args:
        mask: [T], nonzero where a token gets gradient.
        cu_seqlens: [B + 1] int.
        step_ids: [B] int, equal for samples of one optimizer step.
        count_empty: a sample without a token under mask 1 counts as one of the step's.

    Returns: [T] float64, 0 under mask 0.
    Raises: ValueError if the shapes do not fit.
    Source: GRPO, arXiv:2402.03300, eq. 3.
    """
    on = _checked_mask(mask, cu_seqlens, step_ids)
    sample = np.arange(len(step_ids))
    tokens = np.bincount(np.repeat(sample, np.diff(cu_seqlens)), weights=on, minlength=len(sample))
    _, step = np.unique(step_ids, return_inverse=True)
    samples = np.bincount(step, weights=(tokens > 0) | count_empty)[step]
    weights = _pooled_weights(on, cu_seqlens, sample)
    result: npt.NDArray[np.float64] = weights / np.repeat(np.maximum(samples, 1.0), np.diff(cu_seqlens))
    return result


def token_sum_weights(
    mask: npt.NDArray[Any], cu_seqlens: npt.NDArray[Any], *, n_global: int, length: float = 1.0
) -> npt.NDArray[np.float64]:
    """Weights of the sum over all tokens, divided by constants: w[t] = mask[t] / (n_global * length).

    Args:
        mask: [T], nonzero where a token gets gradient.
        cu_seqlens: [B + 1] int.
        n_global: trajectories (or samples) per optimizer step.
        length: the constant in place of each response's length; 1 sums over tokens.

    Returns: [T] float64, 0 under mask 0.
    Raises: ValueError if a divisor is not positive or the shapes do not fit.
    Source: Dr. GRPO, arXiv:2503.20783, with a constant length.
    """
    on = _checked_mask(mask, cu_seqlens, np.empty(len(cu_seqlens) - 1))
    if n_global <= 0 or not length > 0:
        raise ValueError(f"n_global is {n_global} and length {length}; both divide, and must be above 0")
    weights: npt.NDArray[np.float64] = on / (n_global * length)
    return weights


def _checked_mask(
    mask: npt.NDArray[Any], cu_seqlens: npt.NDArray[Any], ids: npt.NDArray[Any]
) -> npt.NDArray[np.float64]:
    if mask.shape != (int(cu_seqlens[-1]),) or ids.shape != (len(cu_seqlens) - 1,):
        raise ValueError(
            f"cu_seqlens tells of {len(cu_seqlens) - 1} samples with {int(cu_seqlens[-1])} tokens, "
            f"but the mask is {mask.shape} and the ids are {ids.shape}"
        )
    on: npt.NDArray[np.float64] = (mask != 0).astype(np.float64)
    return on


def _pooled_weights(
    on: npt.NDArray[np.float64], cu_seqlens: npt.NDArray[Any], pool: npt.NDArray[np.intp]
) -> npt.NDArray[np.float64]:
    """on / (sum of `on` over the token's pool); `pool` [B] numbers the pools from 0."""
    token_pool = np.repeat(pool, np.diff(cu_seqlens))
    count = np.bincount(token_pool, weights=on, minlength=int(pool.max(initial=-1)) + 1)
    weights: npt.NDArray[np.float64] = on / np.maximum(count, 1.0)[token_pool]
    return weights
