"""Qwen3 dense: grouped-query attention with RMSNorm on each query and key head, gated MLP, no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vime.models.base import Family


class Qwen3(Family):
    """Qwen3ForCausalLM. Its head width is a setting of its own, not hidden_size / heads."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    has_window_switch = True
    only: ClassVar[Mapping[str, Any]] = {**Family.only, "attention_bias": False}

    def transformer(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        return {"qk_layernorm": True}

    def head_dim(self, hf: Mapping[str, Any]) -> int:
        return int(hf.get("head_dim") or 128)
