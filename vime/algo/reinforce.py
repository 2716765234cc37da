"""Plain REINFORCE: no importance ratio and no clipping."""

from __future__ import annotations

import torch
from torch import Tensor

from vime.algo.policy_loss import PolicyLoss, masked_ratio


def reinforce_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None
) -> PolicyLoss:
    """loss = -A log_probs for each token, before any aggregation.

    Its gradient is that of the clipped loss while the policy has not moved; later steps on the same rollout are not
    corrected for the move.

    Args:
        log_probs: [T] float, the policy that is differentiated.
        old_log_probs: [T] float, the policy before the step; only for the ratio that is reported.
        advantages: [T] float.
        mask: [T], nonzero where a token counts. Elsewhere the loss is 0 and no gradient flows, NaN inputs included.

    Returns: loss (differentiable), ratio (1 under mask 0), clipped and dual_clipped (False).
    Source: R. J. Williams, "Simple statistical gradient-following algorithms" (1992).
    """
    if mask is not None:
        log_probs, advantages = (torch.where(mask.bool(), x, torch.zeros_like(x)) for x in (log_probs, advantages))
    ratio = masked_ratio(log_probs.detach() - old_log_probs.detach(), mask)
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyLoss(-advantages.detach() * log_probs, ratio, nothing, nothing)
