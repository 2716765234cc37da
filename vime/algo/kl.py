"""Estimators of the KL divergence to a reference policy from one sampled token each."""

from __future__ import annotations

import torch
from torch import Tensor

from vime.algo.policy_loss import LOG_RATIO_LIMIT, finite_ratio

KL_KINDS = ("k1", "k2", "k3", "low_var_kl", "abs")
LOW_VAR_KL_LIMIT = 10.0  # the bound of low_var_kl; k3 itself stays unbounded


def kl_estimate(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    kind: str,
    *,
    log_ratio: Tensor | None = None,
) -> Tensor:
    """An estimate of KL(policy || reference) for each token that the policy sampled.

    With d = log_probs - ref_log_probs: k1 is d (unbiased, may be negative); k2 is d^2 / 2 (its gradient is that of the
    KL); k3 is exp(-d) - 1 + d (unbiased, never negative); low_var_kl is k3 limited to [-10, 10]; abs is |d|.

    Args:
        log_probs: [T] float, the policy; gradients flow through it.
        ref_log_probs: [T] float, the reference; gradients do not.
        kind: one of KL_KINDS.
        log_ratio: [T] float, of the policy to the one that sampled the tokens; the estimate is multiplied with its exp
            (before any limit) and the gradient flows through it, too. It makes the estimate, and for k1 and k3 its
            gradient, unbiased once the policy has moved. None: as if the policy had sampled the tokens itself.

    Returns: [T] float, in nats.
    Raises: ValueError on an unknown kind.
    Source: J. Schulman, "Approximating KL divergence" (2020); k3 in the loss: GRPO, arXiv:2402.03300, eq. 4; with the
        ratio: DeepSeek-V3.2, arXiv:2512.02556, eq. 7.
    """
    d = log_probs - ref_log_probs.detach()
    ratio: Tensor | float = 1.0 if log_ratio is None else finite_ratio(log_ratio)
    match kind:
        case "k1":
            return ratio * d
        case "k2":
            return ratio * d.square() / 2
        case "k3":
            return ratio * _k3(d)
        case "low_var_kl":
            return (ratio * _k3(d)).clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT)
        case "abs":
            return ratio * d.abs()
    raise ValueError(f"unknown KL estimator {kind!r}; choose one of {', '.join(KL_KINDS)}")


def _k3(d: Tensor) -> Tensor:
    # expm1 keeps the digits that exp(-d) - 1 would cancel near d = 0; the limit keeps float32 finite.
    return torch.expm1((-d).clamp(max=LOG_RATIO_LIMIT)) + d
