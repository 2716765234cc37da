"""The user's Megatron flags on top of the checkpoint's settings."""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from vime.config.stages import stages_of
from vime.errors import ConfigError
from vime.models import family_of
from vime.trainer.megatron.settings import megatron_settings

HF = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 1e4,
    "max_position_embeddings": 128,
    "dtype": "float32",
}


PP = {"pipeline_model_parallel_size": 2}


def settings(hf=(), world_size=1, **overrides):
    hf = {**HF, **dict(hf)}
    return megatron_settings(
        family_of(hf).settings(hf), {"lr": 1e-4, **overrides}, device_type="cpu", world_size=world_size
    )


def test_overrides_reach_the_object_that_has_the_field():
    s = settings(clip_grad=0.5, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    s2 = settings(bucket_size=1000, overlap_grad_reduce=True, grad_reduce_in_fp32=False)
    assert settings().ddp.grad_reduce_in_fp32 and not s2.ddp.grad_reduce_in_fp32
    fused = settings(bias_activation_fusion=True, bias_dropout_fusion=True).transformer
    assert fused.bias_activation_fusion and fused.bias_dropout_fusion
    assert not settings(check_for_nan_in_grad=True).ddp.check_for_nan_in_grad  # the trainer's own, which all ranks hear
    assert s.optimizer.clip_grad == 0.5 and s.transformer.recompute_granularity == "full"
    assert s2.ddp.bucket_size == 1000 and s2.ddp.overlap_grad_reduce
    assert s.ddp.use_distributed_optimizer and s.optimizer.use_distributed_optimizer


@pytest.mark.parametrize(
    ("dtype", "flags", "want"),
    [
        ("float32", {}, torch.float32),
        ("bfloat16", {}, torch.bfloat16),
        ("float32", {"bf16": True}, torch.bfloat16),
        ("bfloat16", {"bf16": False}, torch.float32),
        ("float16", {"bf16": True}, torch.bfloat16),
    ],
)
def test_precision_is_the_checkpoints_unless_a_flag_says_otherwise(dtype, flags, want):
    s = settings({"dtype": dtype}, **flags)
    assert s.dtype == want and s.optimizer.bf16 == (want == torch.bfloat16) and s.ddp.grad_reduce_in_fp32


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"no_such_thing": 1}, "no_such_thing"),
        ({"tensor_model_parallel_size": 2}, "--tensor-model-parallel-size 2"),
        ({"fp16": True}, "--fp16"),
        ({"hidden_dropout": 0.1}, "--hidden-dropout"),
        ({"qk_clip": True}, "--qk-clip True is not supported"),
        ({"no_rope_freq": 4}, "--no-rope-freq 4 is not supported"),
        ({"layernorm_zero_centered_gamma": True}, "--layernorm-zero-centered-gamma True is not supported"),
        ({"log_num_zeros_in_grad": True}, "--log-num-zeros-in-grad True is not supported"),
        ({"num_layers": 3}, "the checkpoint has 2"),
        ({"optimizer": "sgd"}, "--optimizer sgd is not supported: .* knows adam alone"),
        ({"decoupled_lr": 1e-5}, "--decoupled-lr 1e-05 is not supported: .* confuses these parameters"),
        ({"deterministic_mode": True}, "--deterministic-mode True is not supported"),
        ({"nccl_ub": True}, "--nccl-ub True is not supported"),
        ({"muon_num_ns_steps": 3}, "--muon-num-ns-steps 3 is not supported"),
        ({"fp8_margin": 1}, "--fp8-margin 1 is not supported: it needs transformer-engine"),
        ({"init_method_std": 0.02}, "--init-method-std 0.02 is not supported: the weights come from"),
        ({"check_for_nan_in_grad": False}, "the trainer always looks"),
        ({"untie_embeddings_and_output_weights": False}, "untie"),
        ({"lr": None}, "--lr is not set"),
    ],
)
def test_what_cannot_be_done_or_contradicts_the_checkpoint_is_refused(flags, word):
    with pytest.raises(ConfigError, match=word):
        settings(**flags)


def test_facts_that_agree_with_the_checkpoint_are_welcome():
    settings(num_layers=2, swiglu=True, rotary_base=10000, vocab_size=61, group_query_attention=True)


def test_all_problems_come_at_once():
    with pytest.raises(ConfigError) as error:
        settings({"dtype": "float16"}, no_such_thing=1, num_layers=3)
    assert len(error.value.problems) == 3


@pytest.mark.parametrize(
    ("ranks", "num_layers", "flags"),
    [
        (2, 4, {}),
        (2, 4, {"virtual_pipeline_model_parallel_size": 2}),
        (4, 8, {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3}),
        (
            3,
            14,
            {
                "num_layers_in_first_pipeline_stage": 2,
                "num_layers_in_last_pipeline_stage": 4,
                "virtual_pipeline_model_parallel_size": 2,
            },
        ),
        (2, 3, {"account_for_loss_in_pipeline_split": True}),
        (
            2,
            6,
            {
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
                "virtual_pipeline_model_parallel_size": 2,
            },
        ),
        (2, 5, {"pipeline_model_parallel_layout": "Ett|t|t|tL"}),
    ],
)
def test_stages_hold_the_layers_that_megatron_would_give_them(monkeypatch, ranks, num_layers, flags):
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=ranks,
        pipeline_dtype=torch.float32,
        **flags,
    )
    virtual = config.virtual_pipeline_model_parallel_size
    monkeypatch.setattr(parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: virtual)
    layers = stages_of(flags, ranks).layers(num_layers)
    assert len(layers) == ranks * (virtual or 1)
    for stage, count in enumerate(layers):
        chunk, rank = divmod(stage, ranks)
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda rank=rank: rank)
        where = chunk if virtual else None
        assert get_num_layers_to_build(config, where) == count
        assert get_transformer_layer_offset(config, where) == sum(layers[:stage])


def test_virtual_stages_talk_while_they_compute():
    s = settings({"num_hidden_layers": 4}, world_size=2, **PP, virtual_pipeline_model_parallel_size=2).transformer
    assert s.overlap_p2p_comm and not s.batch_p2p_comm and s.virtual_pipeline_model_parallel_size == 2
    s = settings({"num_hidden_layers": 4}, world_size=2, **PP, num_layers_per_virtual_pipeline_stage=2).transformer
    assert not s.overlap_p2p_comm and s.batch_p2p_comm and s.virtual_pipeline_model_parallel_size is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("multi_latent_attention", True),
        ("softmax_scale", 0.3),
        ("glu_linear_offset", 1.0),
        ("window_attn_skip_freq", 2),
        ("cuda_graph_impl", "local"),
        ("fp32_residual_connection", True),
        ("attention_softmax_in_fp32", False),
    ],
)
def test_settings_of_another_model_and_those_that_nothing_reads_are_refused(name, value):
    with pytest.raises(ConfigError, match=name.replace("_", "-")):
        settings(**{name: value})


def test_what_is_so_anyway_may_be_said():
    assert settings(attention_softmax_in_fp32=True, multi_latent_attention=False, cuda_graph_impl="none")
