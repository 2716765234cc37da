"""Log-probs and entropy from hidden states, chunk by chunk, so that the logits of a whole batch never exist.

P positions, V vocabulary, D hidden, C chunk size. Logits live for one chunk in forward and again in backward, where
they are computed a second time: 4 * C * V bytes instead of 4 * P * V.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk_size: int,
    with_entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, and the entropy of each distribution.

    Args:
        hidden: [P, D] after the final norm.
        weight: [V, D] output layer; rows of a padded vocabulary must be cut off before.
        targets: [P] int64.
        temperature: logits are divided by it, as the engine's sampler does.
        chunk_size: C.
        with_entropy_grad: let gradients flow through the entropy too.
    Returns: log_probs [P] and entropy [P], float32, in nats; entropy is detached without `with_entropy_grad`.
    """
    log_probs, entropy = _ChunkedLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperature, chunk_size
    )
    return log_probs, entropy if with_entropy_grad else entropy.detach()


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_size: int
    ) -> tuple[Tensor, Tensor]:
        log_probs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(log_probs)
        for rows in _chunks(hidden.shape[0], chunk_size):
            log_p = _log_softmax(hidden[rows], weight, temperature)
            log_probs[rows] = log_p.gather(1, targets[rows, None])[:, 0]
            entropy[rows] = _entropy(log_p)
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, targets = ctx.saved_tensors
        d_log_probs, d_entropy = grads
        d_hidden = torch.zeros_like(hidden)
        # float32, so that the sum over chunks loses no more than one matmul over all positions would.
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in _chunks(hidden.shape[0], ctx.chunk_size):
            log_p = _log_softmax(hidden[rows], weight, ctx.temperature)
            d_logits = torch.zeros_like(log_p)
            p = log_p.exp()
            if d_entropy is not None:  # dH/dx_j = -p_j (log p_j + H)
                d_logits -= d_entropy[rows, None] * p * (log_p + _entropy(log_p)[:, None])
            if d_log_probs is not None:  # dlogp_t/dx_j = [j = t] - p_j
                g = d_log_probs[rows, None]
                d_logits.addcmul_(p, g, value=-1.0).scatter_add_(1, targets[rows, None], g)
            d_logits = (d_logits / ctx.temperature).to(weight.dtype)
            d_hidden[rows] = d_logits @ weight
            d_weight += d_logits.t() @ hidden[rows]
        return d_hidden, d_weight.to(weight.dtype), None, None, None


def _log_softmax(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """[C, V] float32. The matmul is in the model's dtype, as in the engine; all after it in float32."""
    return torch.log_softmax((hidden @ weight.t()).float() / temperature, -1)


def _entropy(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p).sum(-1)


def _chunks(n: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]
