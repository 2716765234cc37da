"""Queries, keys and values from hidden states: the cut into heads, their norms and RoPE, on CUDA in one pass.

T packed tokens, G key/value heads, R query heads of each, H = G * R query heads, D head width, W its rotated part.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from vime.trainer.megatron.batches.packing import Packed
from vime.trainer.megatron.nn.compiled import compiled
from vime.trainer.megatron.nn.norms import rms_scale
from vime.trainer.megatron.nn.rope import apply_rope


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
        d_mixed = torch.empty_like(mixed)
        d_mixed[:, :, -1].copy_(grads[2])
        d_weights: list[Tensor | None] = []
        for is_key, grad, weight in ((False, grads[0], q_weight), (True, grads[1], k_weight)):
            grad = grad.contiguous().view(*mixed.shape[:2], -1, mixed.shape[3])
            scale = _before_norm(d_mixed, mixed, grad, cos, sin, weight, ctx.eps, is_key)
            of_weight = None if scale is None else _by_weight(mixed, grad, cos, sin, scale, is_key)
            d_weights.append(None if of_weight is None else of_weight.sum(0).to(weight.dtype))
        return (d_mixed, *d_weights, None, None, None)


@compiled(0, 1, 2, rounds=True)
def _forward(
    mixed: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = split(mixed)
    return (
        _rotated(_normalised(query, q_weight, eps), cos, sin),
        _rotated(_normalised(key, k_weight, eps), cos, sin),
        value.clone(),
    )


# The way back, of keys or of queries; grad [T, G, 1 or R, D] is the gradient by the rotated ones. Written so
# that nothing but the result leaves the kernel, for which no expression of more than four tensors may be used twice.


@compiled(0, 1, 2, 3, 4)
def _before_norm(
    out: Tensor,
    mixed: Tensor,
    grad: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None,
    eps: float,
    is_key: bool,
) -> Tensor | None:
    """Into `out`, like `mixed`, the gradient by the norm's input. Returns: `rms_scale` of the heads with norms."""
    before = _rotated(grad.float(), cos[:, None], -sin[:, None])
    if weight is None:
        out[:, :, _place(is_key)] = before.to(out.dtype)
        return None
    wide = mixed[:, :, _place(is_key)].float()
    scale = rms_scale(wide, eps)
    unit = wide * scale
    along = (before * (unit * weight.float())).mean(-1, keepdim=True)
    out[:, :, _place(is_key)] = (before * (weight.float() * scale) - unit * (scale * along)).to(out.dtype)
    return scale


@compiled(0, 1, 2, 3, 4)
def _by_weight(mixed: Tensor, grad: Tensor, cos: Tensor, sin: Tensor, scale: Tensor, is_key: bool) -> Tensor:
    """[T, D] float32, each token's part of the gradient by the norm's weight.

    The sum over tokens is a kernel of its own: in one with RoPE the compiler reads and rotates column by
    column, far below the memory's speed.
    """
    unit = mixed[:, :, _place(is_key)].float() * scale
    return (_rotated(grad.float(), cos[:, None], -sin[:, None]) * unit).sum((1, 2))


def _place(is_key: bool) -> slice:
    """Where a group has its key, or its query heads."""
    return slice(-2, -1) if is_key else slice(0, -2)


def _normalised(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of each head, rounded as torch's kernel does."""
    if weight is None:
        return x
    wide = x.float()
    return (wide * rms_scale(wide, eps) * weight.float()).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `apply_rope`: in float32, rounded once to x's dtype."""
    half = cos.shape[-1]
    wide, c, s = x.float(), cos.float(), sin.float()
    if 2 * half == x.shape[-1]:
        # With the halves exchanged it is one expression of an element, which stays in one kernel with the norm.
        halves = wide.unflatten(-1, (2, half))  # type: ignore[no-untyped-call]
        signs = 2 * torch.arange(2, device=x.device)[:, None] - 1
        rotated: Tensor = halves * c[..., None, :] + halves.flip(-2) * (s[..., None, :] * signs)
        return rotated.flatten(-2).to(x.dtype)
    a, b = wide[..., :half], wide[..., half : 2 * half]
    return torch.cat((a * c - b * s, b * c + a * s, wide[..., 2 * half :]), -1).to(x.dtype)
