"""Queries, keys and values from hidden states: the cut into heads, their norms and RoPE, on CUDA in one pass.

T packed tokens, G key/value heads, R query heads of each, H = G * R query heads, D head width, W its rotated part.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from vime.trainer.megatron.compiled import compiled
from vime.trainer.megatron.packing import Packed
from vime.trainer.megatron.rope import apply_rope


class PackedSelfAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's self-attention over packed sequences.

    Megatron copies queries and keys at each of its steps, and its packed RoPE loops over the sequences in Python. Here
    RoPE's tables come with the micro-batch, and on CUDA one function does all that lies between two matrix products.
    """

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params: Packed, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            hidden_states: [T, 1, hidden]; with sequence parallel this rank's part of T.
            attention_mask: unused; the mask is causal within each sequence.
            packed_seq_params: the micro-batch's layout.
        Returns: [T, 1, hidden], and what is to be added to it, if something is.
        """
        mixed, _ = self.linear_qkv(hidden_states)
        groups, width = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        mixed = mixed.view(mixed.shape[0], groups, -1, width)
        query, key, value = self._heads(mixed, packed_seq_params.cos, packed_seq_params.sin)
        attend = self.core_attention
        if self.checkpoint_core_attention and self.training:
            attend = self._checkpointed_attention_forward
        out = attend(query, key, value, attention_mask, packed_seq_params=packed_seq_params)
        output, bias = self.linear_proj(out[:, None])
        return output, bias

    def _heads(self, mixed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if mixed.is_cuda:
            q_weight, k_weight = (getattr(norm, "weight", None) for norm in (self.q_layernorm, self.k_layernorm))
            return fused_heads(mixed, q_weight, k_weight, cos, sin, self.config.layernorm_epsilon)
        # As the engine on a CPU rounds: see `RMSNorm`.
        query, key, value = split(mixed)
        return apply_rope(self.q_layernorm(query), cos, sin), apply_rope(self.k_layernorm(key), cos, sin), value


def split(mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[T, H, D] queries, [T, G, D] keys and values of [T, G, R + 2, D]."""
    return mixed[:, :, :-2].flatten(1, 2), mixed[:, :, -2], mixed[:, :, -1]


def fused_heads(
    mixed: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The heads of each token, normalised and rotated, each rounded once; computed in float32.

    Args:
        mixed: [T, G, R + 2, D] of each group its query heads, then key and value.
        q_weight, k_weight: [D] of the norms; None without them.
        cos, sin: [T, 1, W / 2].
        eps: of the norms.
    Returns: [T, H, D], [T, G, D], [T, G, D].
    """
    query, key, value = _Heads.apply(mixed, q_weight, k_weight, cos, sin, eps)  # type: ignore[no-untyped-call]
    return query, key, value


class _Heads(torch.autograd.Function):
    """Keeps what it was given and computes the norms anew on the way back: that reads less than keeping would write."""

    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(mixed, q_weight, k_weight, cos, sin)
        ctx.eps = eps
        return _forward(mixed, cos, sin, q_weight, k_weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mixed, q_weight, k_weight, cos, sin = ctx.saved_tensors
        d_query, d_key, d_value = (grad.contiguous() for grad in grads)
        found = _backward(mixed, cos, sin, d_query, d_key, d_value, q_weight, k_weight, ctx.eps)
        return (*found, None, None, None)


@compiled(0, 1, 2)
def _forward(
    mixed: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = split(mixed)
    return (
        _rotated(_normalised(query, q_weight, eps), cos, sin),
        _rotated(_normalised(key, k_weight, eps), cos, sin),
        value.clone(),
    )


@compiled(0, 1, 2, 3, 4, 5)
def _backward(
    mixed: Tensor,
    cos: Tensor,
    sin: Tensor,
    d_query: Tensor,
    d_key: Tensor,
    d_value: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    query, key, _ = split(mixed)
    of_query, of_q_weight = _before_norm(_rotated(d_query.float(), cos, -sin), query, q_weight, eps)
    of_key, of_k_weight = _before_norm(_rotated(d_key.float(), cos, -sin), key, k_weight, eps)
    parts = [of_query.view(*mixed.shape[:2], -1, mixed.shape[3]), of_key[:, :, None], d_value[:, :, None]]
    return torch.cat([part.to(mixed.dtype) for part in parts], 2), of_q_weight, of_k_weight


def _normalised(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of each head, rounded as torch's kernel does."""
    if weight is None:
        return x
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _before_norm(grad: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor | None]:
    """Gradients by the norm's input and weight, from one by its output. Args: grad: [T, heads, D] float32."""
    if weight is None:
        return grad, None
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    unit = wide * scale
    by_unit = grad * weight.float()
    by_x = (by_unit - unit * (by_unit * unit).mean(-1, keepdim=True)) * scale
    return by_x, (grad * unit).sum((0, 1)).to(weight.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `apply_rope`: in float32, rounded once to x's dtype."""
    half = cos.shape[-1]
    wide, c, s = x.float(), cos.float(), sin.float()
    a, b = wide[..., :half], wide[..., half : 2 * half]
    parts = [a * c - b * s, b * c + a * s, *([wide[..., 2 * half :]] if 2 * half < x.shape[-1] else [])]
    return torch.cat(parts, -1).to(x.dtype)
