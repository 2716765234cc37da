"""Tokens laid out by expert, and experts' outputs summed by token: in the place of megatron-core's functions.

Its `permute` waits for the device to learn how many rows there are, which is known; its `unpermute` adds a token's rows
up on CUDA in whatever order they come, in the model's dtype. These do neither: sums go in the order of experts, in
float32. Its `sort_chunks_by_idxs` copies all rows also where they lie in order.

T tokens, H hidden, E experts, K of them for each token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe import moe_utils
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
    return F.embedding_bag(routes.place, rows.detach().contiguous(), mode="sum")


def sort_chunks_by_idxs(
    input: Tensor, split_sizes: Tensor, sorted_idxs: Tensor, probs: Tensor | None = None, fused: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Chunks of rows in another order; one rank that has all experts has them in order.

    Args:
        input: [rows, H].
        split_sizes: [chunks] on the host.
        sorted_idxs: [chunks] their numbers in the order wanted, on the host.
        probs: [rows].
    """
    if bool((sorted_idxs[1:] > sorted_idxs[:-1]).all()):
        return input, probs
    sorted_input, sorted_probs = moe_utils.sort_chunks_by_idxs(input, split_sizes, sorted_idxs, probs, fused)
    return sorted_input, sorted_probs
