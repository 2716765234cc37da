"""Rotary position embedding: angles per position, computed as transformers does, whose weights these are."""

from __future__ import annotations

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
