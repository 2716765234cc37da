"""A linear layer in float32 whose every output depends on its own row of the input alone.

A matrix product sums over the inputs in blocks that depend on the library, and on how many rows there are: a token
computed by itself, as engines do it, differs in the last place from the same token among others, and torch's from
oneDNN's. Here the inputs are summed in blocks so short that every kernel adds them up alike, always with several rows,
and the blocks' sums are added in their order.

n rows, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_INPUTS = 64
"""Summed up at a time."""
_ROWS = 16
"""At least; with fewer, and with several threads, MKL sums a row in parts."""


def fixed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias. Gradients are those of torch's linear.

    Args:
        x: [..., K] float32; in other dtypes it is torch's linear.
        weight: [N, K].
        bias: [N].
    Returns: [..., N].
    """
    if x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    out: Tensor = _Fixed.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


class _Fixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        num_rows = len(rows)
        if num_rows < _ROWS:
            rows = F.pad(rows, (0, 0, 0, _ROWS - num_rows))
        blocks = zip(torch.split(rows, _INPUTS, 1), torch.split(weight, _INPUTS, 1), strict=True)
        first, inputs = next(blocks)
        out = first @ inputs.t()
        for part, inputs in blocks:
            out += part @ inputs.t()
        if bias is not None:
            out += bias
        real: Tensor = out[:num_rows].view(*x.shape[:-1], len(weight))
        return real

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        rows = grad.reshape(-1, grad.shape[-1])
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            grad @ weight if of_x else None,
            rows.t() @ x.reshape(-1, x.shape[-1]) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )
