"""Megatron settings that this trainer can only run at one value. Pure data: the command line checks it too, at once.

A setting leaves this table when the trainer learns it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Kernels that only transformer-engine or apex have.
NO_FUSIONS = (
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "persist_layer_norm",
    "apply_rope_fusion",
    "moe_permute_fusion",
    "moe_router_fusion",
)
_NO_EXPERTS = "the checkpoint's model has no experts"
_NO_BALANCING = (
    "megatron-core scales losses of the router by token counts, for gradients that are divided by them; here the loss "
    "weights hold every divisor"
)
_NO_DROPPING = "a token's log-prob must not depend on the other tokens of its micro-batch"
_CHECKPOINT_SAYS = "the checkpoint decides, and has none"
_CONTEXT = "context-parallel ranks split sequences in zigzag and gather keys and values"
_OTHER_MODEL = "no supported family has it, and engines would serve another model"
_NO_GRAPHS = "micro-batches differ in length, and graphs of fixed shapes cannot run them"
_UNREAD = "no part of the trainer reads it"
_NO_TE = "it needs transformer-engine"
_FSDP = "it is for Megatron's FSDP; the distributed optimizer shards instead"
_SCALE = "no loss is scaled; it is for float16"
_NO_MTP = "multi-token prediction is not trained"
_LOADED = "the weights come from the checkpoint"
_NO_INFERENCE = "the engines generate"
_NO_OFFLOAD = "it needs transformer-engine; use --recompute-granularity"
_ONLY_ADAM = (
    "megatron-core's distributed optimizer knows adam alone, and none of its optimizers can go on with another from a "
    "checkpoint"
)
_GROUPS = "megatron-core confuses these parameters' learning rate with the others' in a resumed run"
# Settings that would make another model of the checkpoint's, or that nothing reads here.
_ELSEWHERE: dict[str, tuple[Any, str]] = {
    **{
        name: (False, _OTHER_MODEL)
        for name in (
            "multi_latent_attention",
            "attention_output_gate",
            "qk_l2_norm",
            "heterogeneous_block_specs",
            "is_hybrid_model",
            "apply_residual_connection_post_layernorm",
        )
    },
    **{
        name: (None, _OTHER_MODEL)
        for name in (
            "experimental_attention_variant",
            "linear_attention_freq",
            "window_attn_skip_freq",
            "mrope_section",
            "activation_func_clamp_value",
            "softmax_scale",
        )
    },
    "glu_linear_offset": (0.0, _OTHER_MODEL),
    "enable_cuda_graph": (False, _NO_GRAPHS),
    "external_cuda_graph": (False, _NO_GRAPHS),
    "cuda_graph_impl": ("none", _NO_GRAPHS),
    "attention_softmax_in_fp32": (True, "attention's softmax is in float32 always"),
    "data_parallel_sharding_strategy": ("no_shard", "the distributed optimizer shards instead"),
    "symmetric_ar_type": (None, _UNREAD),
    **{
        name: (False, _UNREAD)
        for name in (
            "fp32_residual_connection",
            "first_last_layers_bf16",
            "fp8_param_gather",
            "use_kitchen",
            "use_kitchen_attention",
            "use_te_activation_func",
            "fused_single_qkv_rope",
            "memory_efficient_layer_norm",
            "use_fused_weighted_squared_relu",
            "init_model_with_meta_device",
            "disable_bf16_reduced_precision_matmul",
            "flash_decode",
        )
    },
    **{
        name: (False, _NO_INFERENCE)
        for name in ("inference_rng_tracker", "use_inference_optimized_layers", "inference_fuse_tp_communication")
    },
    "inference_sampling_seed": (42, _NO_INFERENCE),
    "mlp_chunks_for_prefill": (1, _NO_INFERENCE),
}
# What belongs to a setting above or below: at megatron-core's own default nothing is asked for.
_DETAILS: dict[str, tuple[Any, str]] = {
    **{
        name: (value, _NO_TE)
        for name, value in (
            ("tp_comm_bulk_wgrad", True),
            ("tp_comm_bulk_dgrad", True),
            ("tp_comm_overlap_ag", True),
            ("tp_comm_overlap_rs", True),
            ("tp_comm_overlap_rs_dgrad", False),
            ("tp_comm_split_ag", True),
            ("tp_comm_split_rs", True),
            ("tp_comm_atomic_ag", False),
            ("tp_comm_atomic_rs", False),
            ("tp_comm_overlap_disable_qkv", False),
            ("tp_comm_overlap_disable_fc1", False),
            ("tp_comm_bootstrap_backend", "nccl"),
            ("cpu_offloading_num_layers", 0),
            ("cpu_offloading_activations", True),
            ("cpu_offloading_weights", False),
            ("cpu_offloading_double_buffering", False),
            ("fp8_recipe", "delayed"),
            ("fp8_param", False),
            ("fp8_quantizer_factory", None),
            ("fp8_margin", 0),
            ("fp8_interval", 1),
            ("fp8_amax_history_len", 1),
            ("fp8_amax_compute_algo", "most_recent"),
            ("fp8_wgrad", True),
            ("fp8_dot_product_attention", False),
            ("fp8_multi_head_attention", False),
            ("tp_only_amax_red", False),
            ("fp4_recipe", "nvfp4"),
            ("fp4_param", False),
            ("fp4_quantizer_factory", None),
            ("num_layers_at_start_in_bf16", 1),
            ("num_layers_at_end_in_bf16", 1),
            ("kitchen_attention_backend", "sdpa"),
            ("disable_parameter_transpose_cache", False),
            ("reuse_grad_buf_for_mxfp8_param_ag", False),
            ("store_param_remainders", True),
        )
    },
    "activation_func_fp8_input_store": (False, "gradients would be of rounded activations"),
    "offload_modules": ([], _NO_OFFLOAD),
    "min_offloaded_tensor_size": (1 << 20, _NO_OFFLOAD),
    "cuda_graph_use_single_mempool": (False, _NO_GRAPHS),
    "cuda_graph_retain_backward_graph": (False, _NO_GRAPHS),
    "cuda_graph_warmup_steps": (3, _NO_GRAPHS),
    "qk_clip_alpha": (0.5, _UNREAD),
    "qk_clip_threshold": (100, _UNREAD),
    "mtp_standalone": (False, _NO_MTP),
    "mtp_loss_scaling_factor": (0.1, _NO_MTP),
    **{
        name: (value, _OTHER_MODEL)
        for name, value in (
            ("dsa_indexer_n_heads", None),
            ("dsa_indexer_head_dim", None),
            ("dsa_indexer_topk", None),
            ("dsa_indexer_loss_coeff", None),
            ("dsa_indexer_use_sparse_loss", False),
            ("linear_conv_kernel_dim", 4),
            ("linear_key_head_dim", 128),
            ("linear_value_head_dim", 128),
            ("linear_num_key_heads", 16),
            ("linear_num_value_heads", 32),
            ("mamba_state_dim", 128),
            ("mamba_head_dim", 64),
            ("mamba_num_groups", 8),
            ("mamba_num_heads", None),
            ("use_mamba_mem_eff_path", True),
        )
    },
}
# Of optimizer, gradient buffers and communication.
_TRAINING: dict[str, tuple[Any, str]] = {
    "optimizer": ("adam", _ONLY_ADAM),
    "sgd_momentum": (0.9, _ONLY_ADAM),
    **{
        name: (value, _ONLY_ADAM)
        for name, value in (
            ("muon_momentum", 0.95),
            ("muon_split_qkv", True),
            ("muon_use_nesterov", False),
            ("muon_scale_mode", "spectral"),
            ("muon_fp32_matmul_prec", "medium"),
            ("muon_num_ns_steps", 5),
            ("muon_tp_mode", "blockwise"),
            ("muon_extra_scale_factor", 1.0),
        )
    },
    "decoupled_lr": (None, _GROUPS),
    "decoupled_min_lr": (None, _GROUPS),
    "loss_scale": (None, _SCALE),
    "initial_loss_scale": (2**32, _SCALE),
    "min_loss_scale": (1.0, _SCALE),
    "loss_scale_window": (1000, _SCALE),
    "hysteresis": (2, _SCALE),
    "check_for_nan_in_grad": (True, "the trainer always looks, and all ranks stop together"),
    "align_param_gather": (False, "untried; each stage gathers weights when it comes to them"),
    "check_for_large_grads": (False, "train/grad_norm is logged"),
    "reduce_scatter_with_fp32_accumulation": (False, "gradients are summed in float32 as they are"),
    "gradient_reduce_div_fusion": (True, _UNREAD),
    "suggested_communication_unit_size": (None, _FSDP),
    "preserve_fp32_weights": (True, _FSDP),
    "keep_fp8_transpose_cache": (False, _FSDP),
    "fsdp_double_buffer": (False, _FSDP),
    "fsdp_manual_registration": (False, _FSDP),
    "outer_dp_sharding_strategy": ("no_shard", _FSDP),
    "nccl_ub": (False, "its allocator is compiled when it starts"),
    "disable_symmetric_registration": (False, "it is for --nccl-ub"),
    "pin_cpu_params": (None, "weights come back from the host through memory that is not pinned"),
    "deterministic_mode": (
        False,
        "kernels of attention and experts add up in any order on CUDA, whatever megatron-core does elsewhere",
    ),
    "async_tensor_model_parallel_allreduce": (True, "megatron-core does not read it any more"),
    "cross_entropy_fusion_impl": ("native", "the head computes log-probs itself, chunk by chunk"),
    "wgrad_deferral_limit": (0, "the head computes its gradient with the log-probs, chunk by chunk"),
    "batch_p2p_sync": (True, "untried; a stage waits for what it is sent"),
    "barrier_with_L1_time": (True, _UNREAD),
    "clone_scatter_output_in_embedding": (True, "the embedding's whole output would stay in memory"),
    "hetereogenous_dist_checkpoint": (False, "all layers of a kind are alike"),
    "perform_initialization": (True, "rows that pad the vocabulary must hold numbers"),
    "use_cpu_initialization": (None, _LOADED),
    "init_method_std": (None, _LOADED),
    "embedding_init_method_std": (None, _LOADED),
}
# Field -> the only value that works today, and what to say of it.
FIXED: dict[str, tuple[Any, str]] = {
    **_ELSEWHERE,
    **_DETAILS,
    **_TRAINING,
    "overlap_p2p_comm_warmup_flush": (
        False,
        "stages wait for each other for ever where they tell each other how long micro-batches are",
    ),
    "pipeline_model_parallel_comm_backend": (None, "stages use the platform's collective backend"),
    "num_microbatches_with_partial_activation_checkpoints": (
        None,
        "megatron-core's schedules hand it to the model, and none of its layers reads it; --recompute-granularity is "
        "for all micro-batches",
    ),
    "overlap_param_gather_with_optimizer_step": (
        False,
        "unproven; --overlap-param-gather overlaps with the forward pass that follows",
    ),
    "delay_wgrad_compute": (False, _NO_TE),
    "cross_entropy_loss_fusion": (False, "the head computes log-probs itself, chunk by chunk"),
    "enable_autocast": (False, "use --bf16"),
    "use_te_rng_tracker": (False, _NO_TE),
    "use_ring_exchange_p2p": (False, "it needs a PyTorch of NVIDIA's own build"),
    "defer_embedding_wgrad_compute": (False, "the head computes its gradient with the log-probs, chunk by chunk"),
    "hierarchical_context_parallel_sizes": (None, _CONTEXT),
    "hybrid_context_parallel": (False, _CONTEXT),
    "max_seqlen_per_dp_cp_rank": (None, _CONTEXT),
    "cp_comm_type": (None, _CONTEXT),
    "tp_comm_overlap": (False, _NO_TE),
    "cpu_offloading": (False, _NO_TE),
    "fine_grained_activation_offloading": (False, _NO_OFFLOAD),
    "num_distributed_optimizer_instances": (1, "the optimizer is spread over all data-parallel ranks"),
    "variable_seq_lengths": (True, "micro-batches are packed and differ in length"),
    "batch_invariant_mode": (False, "its kernels need transformer-engine and flash-attn"),
    "ep_overlap_early_attn_memory_release": (False, "it is for --overlap-moe-expert-parallel-comm"),
    "overlap_moe_expert_parallel_comm": (False, "untried; it needs interleaved stages or no stages at all"),
    "mtp_num_layers": (None, _NO_MTP),
    "fp16": (False, "a float16 loss scale would skip steps silently; use bf16"),
    "fp8": (None, "fp8 needs transformer-engine"),
    "fp4": (None, "fp4 needs transformer-engine"),
    "hidden_dropout": (0.0, "a log-prob must not depend on dropout"),
    "attention_dropout": (0.0, "a log-prob must not depend on dropout"),
    "softmax_type": ("vanilla", "the torch-native attention has no other"),
    "rotary_interleaved": (False, "the torch-native attention rotates halves"),
    "no_rope_freq": (None, "the torch-native attention rotates in every layer"),
    "qk_clip": (False, "the trainer does not rescale weights after a step"),
    "log_max_attention_logit": (False, "the torch-native attention does not keep its logits"),
    "layernorm_zero_centered_gamma": (False, "the torch-native norm multiplies with the weight as it is"),
    "log_num_zeros_in_grad": (False, "the trainer does not count them; train/grad_norm is logged"),
    "apply_query_key_layer_scaling": (False, "the torch-native attention does not read it"),
    "calculate_per_token_loss": (True, "the loss weights hold every divisor; gradients are summed"),
    "average_in_collective": (False, "the loss weights hold every divisor; gradients are summed"),
    "use_megatron_fsdp": (False, "the distributed optimizer shards instead"),
    "use_custom_fsdp": (False, "the distributed optimizer shards instead"),
    **{name: (False, "its kernel needs transformer-engine or apex") for name in NO_FUSIONS},
}


# The same for models with experts.
EXPERTS: dict[str, tuple[Any, str]] = {
    "moe_router_load_balancing_type": ("none", _NO_BALANCING),
    "moe_aux_loss_coeff": (0.0, _NO_BALANCING),
    "moe_z_loss_coeff": (None, _NO_BALANCING),
    "moe_per_layer_logging": (False, "there is no loss of the router to log"),
    "moe_router_dtype": ("fp32", "it is the precision that chooses the experts the checkpoint was trained with"),
    "moe_router_bias_update_rate": (0.0, "the experts' biases stay the checkpoint's"),
    "moe_router_force_load_balancing": (False, "random routing is for benchmarks of other trainers"),
    "moe_enable_routing_replay": (False, "use --use-rollout-routing-replay or --use-routing-replay"),
    "moe_input_jitter_eps": (None, "a log-prob must not depend on noise"),
    "moe_token_dropping": (False, _NO_DROPPING),
    "moe_expert_capacity_factor": (None, _NO_DROPPING),
    "moe_pad_expert_input_to_capacity": (False, _NO_DROPPING),
    "moe_token_drop_policy": ("probs", _NO_DROPPING),
    "moe_router_padding_for_quantization": (False, "fp8 needs transformer-engine"),
    "moe_router_padding_for_fp8": (False, "fp8 needs transformer-engine"),
    "moe_router_topk_limited_devices": (None, "megatron-core has replaced it by groups of experts"),
    "moe_grouped_gemm": (True, "all experts of a rank are always multiplied in one call"),
    "moe_use_legacy_grouped_gemm": (False, "it needs the package grouped_gemm"),
    "moe_token_dispatcher_type": ("alltoall", "the others know micro-batches of one length only, or need DeepEP"),
    "moe_flex_dispatcher_backend": ("deepep", "--moe-token-dispatcher-type flex is not supported"),
    "moe_enable_deepep": (False, "it needs DeepEP"),
    "moe_deepep_num_sms": (20, "it needs DeepEP"),
    "moe_hybridep_num_sms": (16, "it needs DeepEP"),
    "moe_extended_tp": (False, "megatron-core does not read it any more; --expert-tensor-parallel-size cuts experts"),
    "moe_layer_recompute": (False, "use --recompute-granularity selective --recompute-modules moe"),
    "moe_apply_probs_on_input": (False, "the supported families weigh experts' outputs"),
    "moe_latent_size": (None, _NO_TE),
    "moe_shared_expert_gate": (False, _CHECKPOINT_SAYS),
    **{
        name: (None, _CHECKPOINT_SAYS)
        for name in (
            "moe_shared_expert_intermediate_size",
            "moe_router_num_groups",
            "moe_router_group_topk",
            "moe_router_topk_scaling_factor",
        )
    },
    "moe_router_enable_expert_bias": (False, _CHECKPOINT_SAYS),
}


_ON_HOST = "with --optimizer-cpu-offload"
# The same with optimizer state on the host.
ON_HOST: dict[str, tuple[Any, str]] = {
    "use_precision_aware_optimizer": (True, f"{_ON_HOST} the host alone has float32 weights"),
    "use_distributed_optimizer": (True, f"{_ON_HOST} state is always spread over data-parallel ranks"),
    "use_torch_optimizer_for_cpu_offload": (True, "it is torch's always"),
    "decoupled_weight_decay": (True, f"{_ON_HOST} there is only AdamW"),
}
# And without.
ON_DEVICE: dict[str, tuple[Any, str]] = {
    "use_precision_aware_optimizer": (False, "it needs transformer-engine, or --optimizer-cpu-offload"),
    **{
        name: (value, "it is read with --optimizer-cpu-offload only")
        for name, value in (
            ("optimizer_offload_fraction", 0.0),
            ("overlap_cpu_optimizer_d2h_h2d", False),
            ("pin_cpu_grads", True),
            ("use_torch_optimizer_for_cpu_offload", False),
        )
    },
}


def limits(given: Mapping[str, Any], *, has_experts: bool) -> Mapping[str, tuple[Any, str]]:
    """What holds for a model with or without experts, and with the optimizer where it is.

    Args: given: the user's settings; those of them that nobody would read are in the result.
    """
    optimizer = ON_HOST if given.get("optimizer_cpu_offload") else ON_DEVICE
    if has_experts:
        return FIXED | optimizer | EXPERTS
    return FIXED | optimizer | {n: (None, _NO_EXPERTS) for n in given if n.startswith("moe_")}
