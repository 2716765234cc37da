"""The clipped policy-gradient loss of PPO, per token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# exp overflows float32 above 88.7, and one token whose weights moved a lot can reach it. e^80 = 5.5e34 still leaves
# room for the product with an advantage. Below the limit nothing changes; above it the ratio is constant.
LOG_RATIO_LIMIT = 80.0


class PolicyLoss(NamedTuple):
    """Per-token results, each [T]; `clipped` and `dual_clipped` are bool, all but `loss` are detached."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    dual_clipped: Tensor


def clipped_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> PolicyLoss:
    """The loss to minimise for each token, before any aggregation.

    With r = exp(log_ratio) and A the advantage: loss = max(-A r, -A clip(r, 1 - eps_clip, 1 + eps_clip_high)).
    With the dual clip, a token with A < 0 loses at most -A eps_clip_c.

    Args:
        log_ratio: [T] float, of the policy that is differentiated to the one before the step: of each token alone
            (PPO), or its sequence's mean (GSPO, `sequences.Sequences.mean`).
        advantages: [T] float.
        eps_clip: lower clip bound of the ratio as an offset from 1 (0.2 means 0.8).
        eps_clip_high: upper bound as an offset from 1; None takes eps_clip.
        eps_clip_c: the dual-clip bound, above 1; None is off.

    Returns: loss (differentiable), ratio, clipped (the clipped branch is strictly worse, so the token has no gradient),
        dual_clipped (the dual bound acted).
    Raises: ValueError on a bound that makes no sense.
    Source: PPO, arXiv:1707.06347, eq. 7; separate upper bound, DAPO, arXiv:2503.14476; dual clip, arXiv:1912.09729;
        sequence-level ratio, GSPO, arXiv:2507.18071.
    """
    low, high = check_bounds(eps_clip, eps_clip_high)
    if eps_clip_c is not None and eps_clip_c <= 1:
        raise ValueError(f"eps_clip_c is {eps_clip_c}; the dual clip needs a bound above 1")
    advantages = advantages.detach()
    ratio = finite_ratio(log_ratio)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(low, high)
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if eps_clip_c is None:
        dual_clipped = torch.zeros_like(clipped)
    else:
        ceiling = -advantages * eps_clip_c
        dual_clipped = (advantages < 0) & (loss > ceiling)
        loss = torch.where(dual_clipped, ceiling, loss)
    return PolicyLoss(loss, ratio.detach(), clipped, dual_clipped)


def finite_ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), finite in float32. [T]"""
    return log_ratio.clamp(max=LOG_RATIO_LIMIT).exp()


def check_bounds(eps_clip: float, eps_clip_high: float | None) -> tuple[float, float]:
    """The bounds of the ratio. Raises: ValueError if an offset is negative."""
    high = eps_clip if eps_clip_high is None else eps_clip_high
    if eps_clip < 0 or high < 0:
        raise ValueError(
            f"clip bounds are offsets from 1, so eps_clip {eps_clip} and eps_clip_high {high} must be >= 0"
        )
    return 1 - eps_clip, 1 + high
