"""GLM-4.5: leading dense layers, half of each head rotated, shared experts, a sigmoid router with a correction bias.

Its multi-token-prediction layer lies behind the last layer in the checkpoint and is kept there as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from vime.models.base import Family, mixture
from vime.models.names import Shape, decoder_layer_rules, shapes_of
from vime.models.settings import ModelSettings


class Glm4Moe(Family):
    """Glm4MoeForCausalLM: GLM-4.5, GLM-4.5-Air, GLM-4.6. Biases on query, key and value and head norms are optional."""

    model_type = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"
    required = (*Family.required, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    default_rotary_percent = 0.5
    # vLLM's model has a head of its own whatever config.json says, and would sample from one that nobody filled.
    only: ClassVar[Mapping[str, Any]] = {**Family.only, "tie_word_embeddings": False}

    def transformer(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        num_layers, dense = hf["num_hidden_layers"], hf.get("first_k_dense_replace", 1)
        return {
            "add_qkv_bias": bool(hf.get("attention_bias", False)),
            "qk_layernorm": bool(hf.get("use_qk_norm", False)),
            **mixture(
                num_experts=hf["n_routed_experts"],
                top_k=hf["num_experts_per_tok"],
                ffn_size=hf["moe_intermediate_size"],
                layers=[int(i >= dense) for i in range(num_layers)],
                score="sigmoid",
                normalised=True,
            ),
            "moe_shared_expert_intermediate_size": hf.get("n_shared_experts", 1) * hf["moe_intermediate_size"],
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": float(hf.get("routed_scaling_factor", 1.0)),
            **_group_fields(hf),
        }

    def num_mtp_layers(self, hf: Mapping[str, Any]) -> int:
        return int(hf.get("num_nextn_predict_layers", 1) or 0)

    def mtp_shapes(self, layer: int, settings: ModelSettings) -> dict[str, Shape]:
        """A layer with experts as the model's own, two norms and a matrix before it, and a norm and a head behind."""
        t = settings.transformer
        one = replace(settings, transformer={**t, "moe_layer_freq": [1] * (layer + 1)})
        hf, hidden = f"model.layers.{layer}.", t["hidden_size"]
        return {
            **{name: shape for rule in decoder_layer_rules(layer, one) for name, shape in shapes_of(rule)},
            **{f"{hf}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")},
            **{f"{hf}{name}.weight": (settings.vocab_size, hidden) for name in ("embed_tokens", "shared_head.head")},
            f"{hf}eh_proj.weight": (hidden, 2 * hidden),
        }

    def problems(self, hf: Mapping[str, Any]) -> list[str]:
        problems = super().problems(hf)
        top_k, normalised = hf.get("num_experts_per_tok"), hf.get("norm_topk_prob", True)
        if normalised is not None and top_k and bool(normalised) != (top_k > 1):
            problems.append(
                f"norm_topk_prob is {normalised} with {top_k} experts a token; Megatron's router divides sigmoids by "
                "their sum where there are several, and never where there is one"
            )
        if (groups := _groups(hf)) and top_k != 2 * groups[1]:
            problems.append(
                f"n_group is {groups[0]} and topk_group {groups[1]} with {top_k} experts a token; the model ranks "
                "groups by their best two experts, Megatron's router by their best num_experts_per_tok // topk_group: "
                f"only {2 * groups[1]} experts a token are supported there"
            )
        return problems


def _group_fields(hf: Mapping[str, Any]) -> dict[str, int]:
    groups = _groups(hf)
    return {"moe_router_num_groups": groups[0], "moe_router_group_topk": groups[1]} if groups else {}


def _groups(hf: Mapping[str, Any]) -> tuple[int, int] | None:
    """Groups of experts, and how many of them a token may choose from; None where it may from all."""
    groups, chosen = hf.get("n_group") or 1, hf.get("topk_group") or 1
    return (groups, chosen) if chosen < groups else None
