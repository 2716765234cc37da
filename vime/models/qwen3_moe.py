"""Qwen3 mixture of experts: Qwen3's attention; a softmax router, no shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vime.models.base import Family, mixture


class Qwen3Moe(Family):
    """Qwen3MoeForCausalLM. Layers may be left dense by `decoder_sparse_step` and `mlp_only_layers`."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    has_window_switch = True
    only: ClassVar[Mapping[str, Any]] = {
        **Family.only,
        "attention_bias": False,
        "shared_expert_intermediate_size": 0,  # vLLM would build one, which transformers' model does not have
    }
    required = (*Family.required, "num_experts_per_tok", "moe_intermediate_size")

    def transformer(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
        layers = [int(i not in dense and (i + 1) % step == 0) for i in range(hf["num_hidden_layers"])]
        if not any(layers):
            return {"qk_layernorm": True}
        return {
            "qk_layernorm": True,
            **mixture(
                num_experts=_num_experts(hf),
                top_k=hf["num_experts_per_tok"],
                ffn_size=hf["moe_intermediate_size"],
                layers=layers,
                score="softmax",
                normalised=bool(hf.get("norm_topk_prob", False)),
            ),
        }

    def problems(self, hf: Mapping[str, Any]) -> list[str]:
        problems = super().problems(hf)
        if not _num_experts(hf):
            problems.append("config.json lacks num_experts")
        if hf.get("num_experts_per_tok") == 1 and hf.get("norm_topk_prob"):
            problems.append("norm_topk_prob with 1 expert a token weighs it 1 whatever the router says; not supported")
        return problems


def _num_experts(hf: Mapping[str, Any]) -> int:
    """Transformers 5 writes the name second."""
    return int(hf.get("num_experts") or hf.get("num_local_experts") or 0)
