"""A small random checkpoint of every family, written by transformers, so that each of its tensors matters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
ROPE = {"rope_theta": 50_000.0, "rope_type": "default"}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-rope": {
        "model_type": "llama",
        "rope_parameters": {
            **ROPE,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen2-yarn": {
        "model_type": "qwen2",
        "rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 8, **EXPERTS},
    # Weights as the softmax over all experts gives them, a dense layer in the middle.
    "qwen3_moe-mixed": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        **EXPERTS,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "n_routed_experts": 8,
        **EXPERTS,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
    },
    # Groups of two experts, one shared one, neither biases nor head norms.
    "glm4_moe-groups": {
        "model_type": "glm4_moe",
        "n_routed_experts": 8,
        **EXPERTS,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
}
"""Name -> what its config says besides sizes. Part of the name before a dash: the family's model_type."""


def write_family(
    folder: Path,
    kind: str,
    sizes: Mapping[str, Any],
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Any:
    """Write a checkpoint with larger weights than transformers' own, so that log-probs differ visibly.

    Args:
        kind: of `KINDS`.
        sizes: the rest of the config.
    Returns: the transformers model, in evaluation mode.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    settings = {"rope_parameters": ROPE, "initializer_range": 0.1, "tie_word_embeddings": tied, **sizes, **KINDS[kind]}
    if settings["model_type"] == "glm4_moe":
        settings["rope_parameters"] = {**settings["rope_parameters"], "partial_rotary_factor": 0.5}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings, dtype=dtype)).to(dtype)
    with torch.no_grad():
        # transformers starts norms at 1 and biases at 0, where a swapped or a missing one would not show.
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.uniform_(-0.5, 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.data = buffer.float().uniform_(-0.3, 0.3)  # float32 whatever the weights are
    model.save_pretrained(folder)
    return model.eval()
