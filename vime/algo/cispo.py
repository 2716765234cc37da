"""CISPO: the importance weight is clipped, not the update, so that every token keeps a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from vime.algo.policy_loss import PolicyLoss, check_bounds, finite_ratio


def cispo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
) -> PolicyLoss:
    """The loss to minimise for each token, before any aggregation.

    With r = exp(log_probs - old_log_probs) and A the advantage:
    loss = -sg(clip(r, 1 - eps_clip, 1 + eps_clip_high)) A log_probs, where sg takes no gradient.

    Args:
        log_probs: [T] float, the policy that is differentiated.
        old_log_probs: [T] float, the policy before the step.
        advantages: [T] float.
        eps_clip: lower bound of the weight as an offset from 1; 1 is no bound, as in the paper.
        eps_clip_high: upper bound as an offset from 1; None takes eps_clip.

    Returns: loss (differentiable), ratio, clipped (the ratio was outside the bounds), dual_clipped
        (False).
    Raises: ValueError on a negative bound.
    Source: CISPO, MiniMax-M1, arXiv:2506.13585, eq. 4.
    """
    low, high = check_bounds(eps_clip, eps_clip_high)
    ratio = finite_ratio(log_probs.detach() - old_log_probs.detach())
    weight = ratio.clamp(low, high)
    loss = -weight * advantages.detach() * log_probs
    return PolicyLoss(loss, ratio, weight != ratio, torch.zeros_like(ratio, dtype=torch.bool))
