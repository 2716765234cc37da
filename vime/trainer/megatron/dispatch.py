"""Tokens laid out by expert, and experts' outputs summed by token: megatron-core's `permute` and `unpermute`.

megatron-core's own wait for the device to learn how many rows there are, which is known, and on CUDA add a token's rows
up in whatever order they come, in the model's dtype. These do neither: sums go in the order of experts, in float32.

T tokens, H hidden, E experts, K of them for each token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routes:
    """Where the copies of each token lie. Given by `permute`, taken by `unpermute`."""

    token: Tensor
    """[T * K] int64: the token of each row."""
    place: Tensor
    """[T, K] int64: the rows of each token, in the order of its experts."""


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor,
    num_out_tokens: int,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor, Routes]:
    """A row for each token and expert that belong together, expert by expert, tokens in order.

    Args:
        tokens: [T, H].
        routing_map: [T, E] bool, true at each token's K experts.
        probs: [T, E] routing probabilities, read where the map is true.
        num_out_tokens: T * K.
        fused, drop_and_pad: must be false; for the signature's sake.
    Returns: rows [T * K, H], their probabilities [T * K], and where they came from.
    """
    assert not fused and not drop_and_pad, "neither fused kernels nor dropped tokens are supported"
    each = num_out_tokens // len(tokens)
    # The map's true columns, without asking the device how many there are.
    experts = routing_map.to(torch.int8).topk(each).indices.sort().values
    order = experts.flatten().argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    routes = Routes(order // each, place.view(-1, each))
    rows: Tensor = _Copies.apply(tokens, routes)  # type: ignore[no-untyped-call]
    return rows, probs.gather(1, experts).flatten().index_select(0, order), routes


def unpermute(
    rows: Tensor,
    routes: Routes,
    restore_shape: torch.Size,
    probs: None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> Tensor:
    """[T, H] the sum of each token's rows; the other arguments are for the signature's sake."""
    assert probs is None and not fused and not drop_and_pad, "rows are weighted and whole when they come here"
    out: Tensor = _Sums.apply(rows, routes)  # type: ignore[no-untyped-call]
    return out


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, routes: Routes) -> Tensor:
        ctx.routes = routes
        return x.index_select(0, routes.token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum_by_token(grads[0], ctx.routes), None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, routes: Routes) -> Tensor:
        ctx.routes = routes
        return _sum_by_token(x, routes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.routes.token), None


def _sum_by_token(rows: Tensor, routes: Routes) -> Tensor:
    """One kernel that gathers and adds up in float32, without a gathered copy."""
    return F.embedding_bag(routes.place, rows.contiguous(), mode="sum")
