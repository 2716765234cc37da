"""Qwen2 and Qwen2.5: grouped-query attention with biases on query, key and value, gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.models.base import Family


class Qwen2(Family):
    """Qwen2ForCausalLM."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    has_window_switch = True

    def transformer(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        return {"add_qkv_bias": True}

    def problems(self, hf: Mapping[str, Any]) -> list[str]:
        problems = super().problems(hf)
        hidden, heads, width = (hf.get(key) for key in ("hidden_size", "num_attention_heads", "head_dim"))
        if hidden and heads and width and width != hidden // heads:
            problems.append(f"head_dim is {width}; vLLM's Qwen2 takes hidden_size / num_attention_heads alone")
        return problems
