"""Megatron settings that this trainer can only run at one value. Pure data: the command line checks it too, at once.

A setting leaves this table when the trainer learns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# Kernels that only transformer-engine or apex have.
NO_FUSIONS = (
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "persist_layer_norm",
    "apply_rope_fusion",
)
# Field -> the only value that works today, and what to say of it.
FIXED: dict[str, tuple[Any, str]] = {
    "tensor_model_parallel_size": (1, "ranks are data-parallel only"),
    "pipeline_model_parallel_size": (1, "ranks are data-parallel only"),
    "context_parallel_size": (1, "ranks are data-parallel only"),
    "expert_model_parallel_size": (1, "ranks are data-parallel only"),
    "expert_tensor_parallel_size": (1, "ranks are data-parallel only"),
    "virtual_pipeline_model_parallel_size": (None, "ranks are data-parallel only"),
    "sequence_parallel": (False, "ranks are data-parallel only"),
    "num_moe_experts": (None, "no mixture-of-experts family is supported"),
    "mtp_num_layers": (None, "multi-token prediction is not trained"),
    "fp16": (False, "a float16 loss scale would skip steps silently; use bf16"),
    "fp8": (None, "fp8 needs transformer-engine"),
    "fp4": (None, "fp4 needs transformer-engine"),
    "hidden_dropout": (0.0, "a log-prob must not depend on dropout"),
    "attention_dropout": (0.0, "a log-prob must not depend on dropout"),
    "softmax_type": ("vanilla", "the torch-native attention has no other"),
    "rotary_interleaved": (False, "the torch-native attention rotates halves"),
    "apply_query_key_layer_scaling": (False, "the torch-native attention does not read it"),
    "calculate_per_token_loss": (True, "the loss weights hold every divisor; gradients are summed"),
    "average_in_collective": (False, "the loss weights hold every divisor; gradients are summed"),
    "overlap_param_gather": (False, "the output layer's weights are read before the gather would be waited for"),
    "use_megatron_fsdp": (False, "the distributed optimizer shards instead"),
    "use_custom_fsdp": (False, "the distributed optimizer shards instead"),
    **{name: (False, "its kernel needs transformer-engine or apex") for name in NO_FUSIONS},
}


def limits(names: Iterable[str]) -> Mapping[str, tuple[Any, str]]:
    """`FIXED`, and those of `names` that nobody would read: settings of experts, which no supported model has."""
    return FIXED | {n: (None, FIXED["num_moe_experts"][1]) for n in names if n.startswith("moe_")}
