"""Qwen3 dense: grouped-query attention with RMSNorm on each query and key head, gated MLP, no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.models.base import Family, Rule, attention_and_mlp_rules


class Qwen3(Family):
    """Qwen3ForCausalLM. Its head width is a setting of its own, not hidden_size / heads."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"

    def transformer(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        return {"qk_layernorm": True}

    def layer_rules(self) -> list[Rule]:
        return attention_and_mlp_rules(qk_norm=True)

    def head_dim(self, hf: Mapping[str, Any]) -> int:
        return int(hf.get("head_dim") or 128)

    def problems(self, hf: Mapping[str, Any]) -> list[str]:
        problems = super().problems(hf)
        layer_types = set(hf.get("layer_types") or ()) - {"full_attention"}
        if hf.get("use_sliding_window") or layer_types:
            problems.append(
                f"it uses sliding-window attention (use_sliding_window {hf.get('use_sliding_window')}, "
                f"layer_types {sorted(layer_types)}); only full attention is supported"
            )
        return problems
