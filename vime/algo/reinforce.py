"""Plain REINFORCE: no importance ratio and no clipping."""

from __future__ import annotations

import torch
from torch import Tensor

from vime.algo.policy_loss import PolicyLoss, finite_ratio


def reinforce_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLoss:
    """loss = -A log_probs for each token, before any aggregation.

    Its gradient is that of the clipped loss while the policy has not moved; later steps on the same rollout are not
    corrected for the move.

    Args:
        log_probs: [T] float, the policy that is differentiated.
        old_log_probs: [T] float, the policy before the step; only for the ratio that is reported.
        advantages: [T] float.

    Returns: loss (differentiable), ratio, clipped and dual_clipped (False).
    Source: R. J. Williams, "Simple statistical gradient-following algorithms" (1992).
    """
    ratio = finite_ratio(log_probs.detach() - old_log_probs.detach())
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyLoss(-advantages.detach() * log_probs, ratio, nothing, nothing)
