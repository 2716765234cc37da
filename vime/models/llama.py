"""Llama (SmolLM2 among them): grouped-query attention, gated MLP, no biases, plain RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.models.base import Family, Rule, attention_and_mlp_rules, unsupported_values


class Llama(Family):
    """LlamaForCausalLM."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"

    def transformer(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        return {"qk_layernorm": False}

    def layer_rules(self) -> list[Rule]:
        return attention_and_mlp_rules(qk_norm=False)

    def head_dim(self, hf: Mapping[str, Any]) -> int:
        return int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])

    def problems(self, hf: Mapping[str, Any]) -> list[str]:
        return super().problems(hf) + unsupported_values(hf, {"pretraining_tp": 1, "sliding_window": None})
