"""Rows to and from distinct places, with gathers and copies for gradients where plain indexing would sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def pad_rows(x: Tensor, place: Tensor, rows: int) -> Tensor:
    """[rows, ...] zeros with x's rows at distinct places.

    Plain indexing would sum in its backward, one row at a time; as no place occurs twice, a gather does.
    """
    padded: Tensor = _PadRows.apply(x, place, rows)  # type: ignore[no-untyped-call]
    return padded


def take_rows(x: Tensor, place: Tensor) -> Tensor:
    """The rows of x at distinct places; the inverse of `pad_rows`."""
    taken: Tensor = _TakeRows.apply(x, place)  # type: ignore[no-untyped-call]
    return taken


class _PadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(place)
        return x.new_zeros(rows, *x.shape[1:]).index_copy_(0, place, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return grads[0].index_select(0, place), None, None


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.rows = x.shape[0]
        return x.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (place,) = ctx.saved_tensors
        grad = grads[0]
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, place, grad), None
