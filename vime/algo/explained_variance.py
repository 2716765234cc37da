"""How much of the returns a value function foresees."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def explained_variance(values: npt.NDArray[Any], returns: npt.NDArray[Any], mask: npt.NDArray[Any]) -> float:
    """1 - Var(returns - values) / Var(returns) over the tokens under mask 1.

    1 is a perfect forecast, 0 one that a constant would equal; below 0 the values are worse than a constant.

    Args:
        values, returns: [T] float; under mask 0 anything, NaN included.
        mask: [T], nonzero where a token counts.
    Returns: NaN where the returns do not vary, or no token counts.
    """
    on = mask != 0
    if not on.any():
        return float("nan")
    target = returns[on].astype(np.float64)
    if target.min() == target.max():
        return float("nan")
    return float(1 - (target - values[on].astype(np.float64)).var() / target.var())
