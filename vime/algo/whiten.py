"""Whitening: mean 0 and variance 1 over all tokens that count, of the whole global batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

WHITEN_EPS = 1e-8


def whiten(
    x: npt.NDArray[Any],
    mask: npt.NDArray[Any],
    *,
    eps: float = WHITEN_EPS,
    unbiased: bool = True,
    clamp: bool = False,
    shift_mean: bool = True,
) -> npt.NDArray[np.float64]:
    """(x - mean) / sqrt(variance + eps) over the entries under mask 1.

    The arrays are those of the whole batch: every part of a sequence is scaled alike, wherever it was computed.

    Args:
        x: [T] float. Values under mask 0 may be anything, NaN included.
        mask: [T], nonzero where an entry counts.
        eps: above 0; keeps equal entries finite.
        unbiased: divide the sum of squares by n - 1, as verl, slime and TRL do; False: by n, as OpenRLHF does.
        clamp: divide by sqrt(max(variance, eps)) instead (OpenRLHF).
        shift_mean: False: give the mean back afterwards.

    Returns: [T] float64, 0 under mask 0. Entries that are all equal give 0 (their mean without `shift_mean`).
    Raises: ValueError if the shapes differ or eps is not above 0.
    """
    if x.shape != mask.shape:
        raise ValueError(f"x has shape {x.shape}, its mask {mask.shape}")
    if not eps > 0:
        raise ValueError(f"eps is {eps}; it keeps the divisor above 0")
    on = mask != 0
    out = np.zeros(x.shape)
    values = x[on].astype(np.float64)
    if not len(values):
        return out
    mean = values.mean()
    # A mean of equal numbers may be off in the last place, and 1 / sqrt(eps) would make that visible.
    centred = np.zeros_like(values) if values.min() == values.max() else values - mean
    variance = float((centred**2).sum()) / max(len(values) - int(unbiased), 1)
    scale = np.sqrt(max(variance, eps) if clamp else variance + eps)
    out[on] = centred / scale + (0.0 if shift_mean else mean)
    return out
