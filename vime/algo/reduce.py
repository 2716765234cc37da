"""Aggregation of per-token losses: weights that turn every reduction into one plain sum.

loss = sum_t weights[t] * token_loss[t] over all tokens of an optimizer step. The weights are fixed when the batch is
made, from the whole step, so the sum does not care how the step is cut into micro-batches, packed or spread over ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


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
    """Weights of the token mean over an optimizer step, as supervised training uses it.

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
