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
_EVEN_STAGES = "every pipeline stage has the same number of layers"
_NO_EXPERTS = "no mixture-of-experts family is supported"
_CONTEXT = "context-parallel ranks split sequences in zigzag and gather keys and values"
# Field -> the only value that works today, and what to say of it.
FIXED: dict[str, tuple[Any, str]] = {
    "virtual_pipeline_model_parallel_size": (
        None,
        "each rank trains one stage; megatron-core's default communication of interleaved stages gives wrong gradients",
    ),
    **{
        name: (None, _EVEN_STAGES)
        for name in (
            "pipeline_model_parallel_layout",
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
        )
    },
    **{
        name: (False, _EVEN_STAGES)
        for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    },
    "overlap_p2p_comm": (False, "only interleaved stages can overlap their communication"),
    "overlap_p2p_comm_warmup_flush": (False, "only interleaved stages can overlap their communication"),
    "microbatch_group_size_per_vp_stage": (None, "each rank trains one stage"),
    "batch_p2p_comm": (True, "untried"),
    "pipeline_model_parallel_comm_backend": (None, "stages use the platform's collective backend"),
    "num_microbatches_with_partial_activation_checkpoints": (None, "untried; --recompute-granularity is for all"),
    "overlap_param_gather_with_optimizer_step": (False, "it needs interleaved stages"),
    "delay_wgrad_compute": (False, "it needs transformer-engine"),
    "cross_entropy_loss_fusion": (False, "the head computes log-probs itself, chunk by chunk"),
    "enable_autocast": (False, "use --bf16"),
    "use_te_rng_tracker": (False, "it needs transformer-engine"),
    "use_ring_exchange_p2p": (False, "it needs a PyTorch of NVIDIA's own build"),
    "defer_embedding_wgrad_compute": (False, "the head computes its gradient with the log-probs, chunk by chunk"),
    "expert_model_parallel_size": (1, _NO_EXPERTS),
    "expert_tensor_parallel_size": (1, _NO_EXPERTS),
    "hierarchical_context_parallel_sizes": (None, _CONTEXT),
    "hybrid_context_parallel": (False, _CONTEXT),
    "max_seqlen_per_dp_cp_rank": (None, _CONTEXT),
    "cp_comm_type": (None, _CONTEXT),
    "tp_comm_overlap": (False, "it needs transformer-engine"),
    "distribute_saved_activations": (False, "untried; use --sequence-parallel to spread activations over ranks"),
    "cpu_offloading": (False, "it needs transformer-engine"),
    "num_distributed_optimizer_instances": (1, "the optimizer is spread over all data-parallel ranks"),
    "variable_seq_lengths": (True, "micro-batches are packed and differ in length"),
    "num_moe_experts": (None, _NO_EXPERTS),
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
