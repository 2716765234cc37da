"""Causal attention of one sequence whose every bit depends on the sequence alone.

Matrix products and torch's attention kernels sum in an order that depends on how many rows they are given, so that a
token computed by itself, as engines do it, differs in the last place from the same token among all others. Here every
sum is over a fixed number of terms, and these are added up in the order of the keys: what a query gives does not depend
on which other queries are computed beside it.

n queries, m keys, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_KEYS = 64
"""Summed up at a time."""
_QUERIES = 64
"""Computed at a time: bounds memory, and changes no bit."""


def fixed_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend to all keys up to one's own. Gradients are those of torch's attention.

    Args:
        query: [n, H, D] of the sequence's last n tokens; with gradients of all m.
        key, value: [m, G, D].
        scale: of the scores.
    Returns: [n, H, D].
    """
    out: Tensor = _Fixed.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
    return out


class _Fixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        first = len(key) - len(query)
        keys, values = (_by_head(x, query.shape[1]) for x in (key, value))
        parts = [
            _attend(chunk, keys, values, scale, first + i * _QUERIES)
            for i, chunk in enumerate(torch.split(query.float(), _QUERIES))
        ]
        return torch.cat(parts).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        given = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            q, k, v = (x.transpose(0, 1)[None] for x in given)
            grouped = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=ctx.scale, enable_gqa=grouped)
            of_query, of_key, of_value = torch.autograd.grad(out[0].transpose(0, 1), given, grads[0])
        return of_query, of_key, of_value, None


def _by_head(x: Tensor, num_heads: int) -> Tensor:
    """[H, m, D] float32 of [m, G, D], padded to whole blocks of keys."""
    wide = x.float().repeat_interleave(num_heads // x.shape[1], 1)
    return F.pad(wide, (0, 0, 0, 0, 0, -len(x) % _KEYS)).transpose(0, 1).contiguous()


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, first: int) -> Tensor:
    """[n, H, D] of queries that stand at `first` and behind. Args: keys, values: [H, whole blocks, D]."""
    num_blocks = -(-(first + len(query)) // _KEYS)
    keys, values = keys[:, : num_blocks * _KEYS], values[:, : num_blocks * _KEYS]
    scores = (query[:, :, None] * keys).sum(-1) * scale
    places = torch.arange(num_blocks * _KEYS, device=query.device)
    own = first + torch.arange(len(query), device=query.device)
    scores = scores.masked_fill((places > own[:, None])[:, None], -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp().view(*scores.shape[:-1], num_blocks, _KEYS)
    blocks = values.view(len(values), num_blocks, _KEYS, -1)
    sums = (weights[..., None] * blocks).sum(-2)  # [n, H, blocks, D]
    totals = weights.sum(-1)
    out, total = sums[:, :, 0], totals[:, :, 0]
    for block in range(1, num_blocks):
        out, total = out + sums[:, :, block], total + totals[:, :, block]
    attended: Tensor = out / total[..., None]
    return attended
