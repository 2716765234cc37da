"""The clipped squared error of PPO's value function, per token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ValueLoss(NamedTuple):
    """Per-token results, each [T]; `clipped` and `moved` are bool and detached."""

    loss: Tensor
    clipped: Tensor
    """The clipped error was strictly larger, so that the token has no gradient."""
    moved: Tensor
    """The value has moved by more than the clip since the rollout."""


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    clip: float | None = None,
) -> ValueLoss:
    """The loss to minimise for each token, before any aggregation.

    With V the value, V_old the one before the first step on this rollout and R the return:
    loss = max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2).
    There is no factor of 1/2; --value-loss-coef 0.5 is that of verl and OpenRLHF.

    Args:
        values: [T] float, differentiated.
        old_values, returns: [T] float; no gradient is taken through them.
        clip: how far the value may move, in the reward's unit, above 0; None is off.

    Raises: ValueError if clip is not above 0.
    Source: the PPO implementation of OpenAI baselines (ppo2); arXiv:2005.12729 describes it.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"the value clip is {clip}; it is a distance above 0, or None")
    old_values, returns = old_values.detach(), returns.detach()
    plain = (values - returns).square()
    if clip is None:
        never = torch.zeros_like(plain, dtype=torch.bool)
        return ValueLoss(plain, never, never)
    change = values - old_values
    bounded = (old_values + change.clamp(-clip, clip) - returns).square()
    return ValueLoss(torch.maximum(plain, bounded), bounded.detach() > plain.detach(), change.detach().abs() > clip)
