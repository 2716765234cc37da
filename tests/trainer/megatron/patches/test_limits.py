"""Every setting of megatron-core is either read by the trainer, or refused at any value but the one it works at."""

import dataclasses

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.families import KINDS
from vime.cli.megatron_flags import CHECKPOINT_ONLY, TRAINER_ONLY, megatron_flags
from vime.models import family_of
from vime.trainer.megatron.patches.limits import EXPERTS, FIXED, ON_DEVICE, ON_HOST

# Settings that change what is done, and where that is shown.
PROVEN = {
    "tests/trainer/megatron/matrix.py": """
        tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
        expert_tensor_parallel_size sequence_parallel virtual_pipeline_model_parallel_size
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split
        account_for_loss_in_pipeline_split pipeline_model_parallel_layout microbatch_group_size_per_vp_stage
        overlap_p2p_comm batch_p2p_comm deallocate_pipeline_outputs bf16 make_vocab_size_divisible_by
        use_distributed_optimizer optimizer_cpu_offload overlap_grad_reduce overlap_param_gather bucket_size
        recompute_granularity recompute_method recompute_num_layers recompute_modules distribute_saved_activations
        moe_shared_expert_overlap lr adam_eps
    """,
    "tests/trainer/megatron/test_settings.py": """
        clip_grad grad_reduce_in_fp32 num_layers_per_virtual_pipeline_stage bias_activation_fusion bias_dropout_fusion
    """,
    "tests/trainer/megatron/test_trainer.py": "min_lr",
    "tests/trainer/megatron/test_optimizer_settings.py": """
        weight_decay adam_beta1 adam_beta2 decoupled_weight_decay apply_wd_to_qk_layernorm
        pad_buckets_for_high_nccl_busbw
    """,
}
DIFFERS = {  # where our one value is not megatron-core's default
    *("calculate_per_token_loss", "variable_seq_lengths", "check_for_nan_in_grad", "hidden_dropout"),
    *("attention_dropout", "rotary_interleaved", "gradient_accumulation_fusion", "pin_cpu_params"),
    *("use_cpu_initialization", "init_method_std", "moe_token_dispatcher_type", "moe_grouped_gemm"),
    *("moe_router_dtype", "moe_router_load_balancing_type", "moe_router_bias_update_rate", "persist_layer_norm"),
    *("barrier_with_L1_time", "fp8_recipe"),  # the optimizer's default is another than the model's
}


def known_fields():
    proven = {name for names in PROVEN.values() for name in names.split()}
    model = {name for kind in ("qwen3_moe", "glm4_moe") for name in shape_of(kind)}
    limited = set(FIXED) | set(EXPERTS) | set(ON_HOST) | set(ON_DEVICE)
    return proven, proven | model | limited | {key for key, *_ in CHECKPOINT_ONLY.values()}


def shape_of(kind):
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    more = dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=64, rope_theta=1e4, rms_norm_eps=1e-6)
    hf = {**sizes, **more, **KINDS[kind], "dtype": "float32"}
    return family_of(hf).settings(hf).transformer


def test_no_flag_of_megatron_is_passed_on_unlooked_at():
    keys = {flag.key for flag in megatron_flags().values() if not flag.refusal}
    proven, known = known_fields()
    assert sorted(keys - known) == []
    assert sorted(proven - keys - set(TRAINER_ONLY)) == []


@pytest.mark.parametrize("config", [TransformerConfig, OptimizerConfig, DistributedDataParallelConfig])
def test_the_value_that_works_is_what_megatron_does_by_itself(config):
    """So that nothing is changed by not handing it on. Exceptions are set by `megatron_settings`."""
    defaults = {
        f.name: f.default_factory()
        if f.default is dataclasses.MISSING and f.default_factory is not dataclasses.MISSING
        else f.default
        for f in dataclasses.fields(config)
    }
    differing = {n for n, (value, _) in FIXED.items() if n in defaults and n not in DIFFERS and defaults[n] != value}
    assert differing == set()
