"""Soft overlong punishment: a penalty that grows as a response comes near its length limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def overlong_penalty(
    response_lengths: npt.NDArray[Any], *, max_length: int, buffer_length: int, factor: float = 1.0
) -> npt.NDArray[np.float64]:
    """What is added to each reward: 0 up to max_length - buffer_length tokens, then linearly down to -factor.

    penalty = -factor * clip((length - (max_length - buffer_length)) / buffer_length, 0, 1)

    Args:
        response_lengths: [B] tokens of each response.
        max_length: tokens a response may have.
        buffer_length: the last tokens before that, over which the penalty grows; 1 to max_length.
        factor: the penalty at max_length, in the reward's unit.

    Returns: [B] float64, 0 or less.
    Raises: ValueError if buffer_length is outside its range or factor is negative.
    Source: DAPO, arXiv:2503.14476, eq. 13.
    """
    if not 0 < buffer_length <= max_length:
        raise ValueError(f"buffer_length is {buffer_length}; it is 1 to the {max_length} tokens a response may have")
    if factor < 0:
        raise ValueError(f"factor is {factor}; a penalty is not below 0")
    over = np.asarray(response_lengths, np.float64) - (max_length - buffer_length)
    penalty: npt.NDArray[np.float64] = -factor * np.clip(over / buffer_length, 0.0, 1.0)
    return penalty
