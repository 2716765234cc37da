"""Rotary position embedding: angles per position, computed as transformers does, whose weights these are; rotations.

T packed tokens, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vime.models import ModelSettings


def inverse_frequencies(model: ModelSettings, device: torch.device) -> tuple[Tensor, float]:
    """Angles per position [rotated part of a head / 2], float32, and what cosine and sine are multiplied by.

    Sources: plain, arXiv:2104.09864; linear, arXiv:2306.15595; yarn, arXiv:2309.00071; llama3, Llama 3.1's release.
    """
    width = model.transformer["kv_channels"]
    if model.rope_scaling is not None:
        return _scaled(model, device)
    rotated = int(width * model.rotary_percent)
    steps = torch.arange(0, rotated, 2, dtype=torch.int64).float()
    frequencies: Tensor = 1.0 / (model.rotary_base ** (steps / rotated))
    return frequencies.to(device), 1.0


def _scaled(model: ModelSettings, device: torch.device) -> tuple[Tensor, float]:
    # The formulas read a config of any class that has these words.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert model.rope_scaling is not None, "plain RoPE"
    parameters = {
        **model.rope_scaling,
        "rope_theta": model.rotary_base,
        "partial_rotary_factor": model.rotary_percent,
    }
    config = LlamaConfig(
        hidden_size=model.transformer["hidden_size"],
        num_attention_heads=model.transformer["num_attention_heads"],
        head_dim=model.transformer["kv_channels"],
        max_position_embeddings=model.max_position_embeddings,
        rope_parameters=parameters,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, device=torch.device("cpu"))
    return frequencies.to(device), float(factor)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head by its token's position, rounded once, as vLLM's kernels do; HF rounds every product.

    Args:
        x: [T, heads, D].
        cos, sin: [T, 1, W / 2] in x's dtype; the first W of each head's D elements are rotated.
    Returns: [T, heads, D].
    """
    rotated: Tensor = _Rope.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


class _Rope(torch.autograd.Function):
    """The rotation; its backward is the rotation by the opposite angle, so nothing but the tables is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(grads[0], cos, -sin), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`apply_rope` without gradients."""
    wide = torch.promote_types(x.dtype, torch.float32)
    half = cos.shape[-1]
    a, b = x[..., :half].to(wide), x[..., half : 2 * half].to(wide)
    cos, sin = cos.to(wide), sin.to(wide)
    rotated = [(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)]
    return torch.cat([*rotated, x[..., 2 * half :]] if 2 * half < x.shape[-1] else rotated, -1)
