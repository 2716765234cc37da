"""What each family reads out of config.json, what it refuses, and its names both ways."""

import pytest

from vime.errors import ConfigError
from vime.models import FAMILIES, Kind, family_of

QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "dtype": "bfloat16",
    "layer_types": ["full_attention", "full_attention"],
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "rope_theta": 1e5,
    "torch_dtype": "float32",
}

QWEN2 = {
    **{k: v for k, v in LLAMA.items() if k != "num_attention_heads"},
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
QWEN3_MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": None,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
GLM = {
    **{k: v for k, v in QWEN2.items() if "sliding_window" not in k},
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "num_hidden_layers": 3,
    "head_dim": 32,
    "attention_bias": True,
    "use_qk_norm": True,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
}
NUM_HF = {Kind.PLAIN: 1, Kind.QKV: 3, Kind.GLU: 2, Kind.EXPERTS: 4, Kind.EXPERTS_GLU: 8}
CONFIGS = {hf["model_type"]: hf for hf in (LLAMA, QWEN2, QWEN3, QWEN3_MOE, GLM)}


def test_qwen3_settings_come_from_its_config():
    s = family_of(QWEN3).settings(QWEN3)
    assert s.transformer["kv_channels"] == 32  # not hidden_size / heads
    assert (s.transformer["num_query_groups"], s.transformer["qk_layernorm"]) == (2, True)
    assert (s.rotary_base, s.tie_word_embeddings, s.dtype, s.vocab_size) == (1e6, True, "bfloat16", 64)


def test_llama_settings_use_the_older_names_and_defaults():
    s = family_of(LLAMA).settings(LLAMA)
    assert s.transformer["kv_channels"] == 16  # hidden_size / heads
    assert s.transformer["num_query_groups"] == 3  # every head its own
    assert (s.rotary_base, s.tie_word_embeddings, s.dtype) == (1e5, False, "float32")


def test_qwen2_has_biases_on_query_key_and_value_alone():
    s = family_of(QWEN2).settings(QWEN2)
    assert (s.transformer["add_qkv_bias"], s.transformer["add_bias_linear"]) == (True, False)
    names = family_of(QWEN2).name_map(s)
    bias = names.to_hf("decoder.layers.1.self_attention.linear_qkv.bias")
    assert bias.hf == tuple(f"model.layers.1.self_attn.{x}_proj.bias" for x in "qkv") and bias.kind is Kind.QKV


@pytest.mark.parametrize(
    ("change", "layers"),
    [({}, [1, 1, 1, 1]), ({"decoder_sparse_step": 2}, [0, 1, 0, 1]), ({"mlp_only_layers": [1]}, [1, 0, 1, 1])],
)
def test_qwen3_moe_says_which_layers_have_experts(change, layers):
    hf = {**QWEN3_MOE, **change}
    s = family_of(hf).settings(hf)
    assert s.transformer["moe_layer_freq"] == layers == [int(s.has_experts(i)) for i in range(4)]
    names = set(family_of(hf).name_map(s).hf_names())
    for i, experts in enumerate(layers):
        assert (f"model.layers.{i}.mlp.experts.3.up_proj.weight" in names) is bool(experts)
        assert (f"model.layers.{i}.mlp.up_proj.weight" in names) is not bool(experts)


def test_qwen3_moe_normalises_its_weights_by_a_softmax_over_the_chosen():
    for normalised in (True, False):
        hf = {**QWEN3_MOE, "norm_topk_prob": normalised}
        t = family_of(hf).settings(hf).transformer
        assert t["moe_router_pre_softmax"] is not normalised
    assert (t["num_moe_experts"], t["moe_router_topk"], t["moe_ffn_hidden_size"]) == (4, 2, 32)
    assert "moe_shared_expert_intermediate_size" not in t


def test_qwen3_moe_experts_have_the_name_transformers_5_writes_too():
    hf = {k: v for k, v in QWEN3_MOE.items() if k != "num_experts"} | {"num_local_experts": 4}
    assert family_of(hf).settings(hf) == family_of(QWEN3_MOE).settings(QWEN3_MOE)


def test_experts_are_stacked_gate_before_up_expert_by_expert():
    names = family_of(QWEN3_MOE).name_map(family_of(QWEN3_MOE).settings(QWEN3_MOE))
    gate_up, down = (names.to_hf(f"decoder.layers.2.mlp.experts.{x}") for x in ("gate_up", "down"))
    prefix = "model.layers.2.mlp.experts."
    assert gate_up.hf[:3] == tuple(prefix + x for x in ("0.gate_proj.weight", "0.up_proj.weight", "1.gate_proj.weight"))
    assert down.hf == tuple(f"{prefix}{e}.down_proj.weight" for e in range(4))
    assert (gate_up.kind, down.kind) == (Kind.EXPERTS_GLU, Kind.EXPERTS)


def test_glm_settings_come_from_its_config():
    s = family_of(GLM).settings(GLM)
    t = s.transformer
    assert (t["add_qkv_bias"], t["qk_layernorm"], s.rotary_percent) == (True, True, 0.5)
    assert (t["moe_layer_freq"], t["moe_shared_expert_intermediate_size"]) == ([0, 1, 1], 64)
    assert (t["moe_router_score_function"], t["moe_router_enable_expert_bias"]) == ("sigmoid", True)
    assert t["moe_router_topk_scaling_factor"] == 2.5 and "moe_router_num_groups" not in t
    plain = {**GLM, "attention_bias": False, "use_qk_norm": False, "rope_parameters": {"partial_rotary_factor": 0.25}}
    s = family_of(plain).settings(plain)
    assert (s.transformer["add_qkv_bias"], s.transformer["qk_layernorm"], s.rotary_percent) == (False, False, 0.25)


@pytest.mark.parametrize(
    ("groups", "fields"), [((4, 1), {"num_groups": 4, "group_topk": 1}), ((2, 2), {}), ((1, 1), {}), ((None, None), {})]
)
def test_glm_limits_tokens_to_groups_of_experts_where_there_is_a_limit(groups, fields):
    hf = {**GLM, "n_group": groups[0], "topk_group": groups[1]}
    t = family_of(hf).settings(hf).transformer
    assert {k.removeprefix("moe_router_"): v for k, v in t.items() if "group_topk" in k or "num_groups" in k} == fields


def test_glm_names_differ_by_layer_and_leave_out_the_layer_of_multi_token_prediction():
    names = family_of(GLM).name_map(family_of(GLM).settings(GLM))
    assert names.to_hf("decoder.layers.0.mlp.linear_fc1.weight").hf[0] == "model.layers.0.mlp.gate_proj.weight"
    assert names.to_hf("decoder.layers.1.mlp.router.expert_bias").hf == (
        "model.layers.1.mlp.gate.e_score_correction_bias",
    )
    shared = names.to_hf("decoder.layers.2.mlp.shared_experts.linear_fc1.weight")
    assert shared.hf[0] == "model.layers.2.mlp.shared_experts.gate_proj.weight" and shared.kind is Kind.GLU
    mtp = ("model.layers.3.eh_proj.weight", "model.layers.3.mlp.experts.0.up_proj.weight")
    assert all(names.is_kept(name) for name in mtp) and not set(mtp) & set(names.hf_names())
    assert not any(names.is_kept(n) for n in (*names.hf_names(), "model.layers.4.eh_proj.weight", "lm_head.weight"))


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("change", "scaling"),
    [
        ({"rope_scaling": None}, None),
        ({"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, {"rope_type": "llama3", **LLAMA3}),
        (
            {"rope_parameters": {"rope_theta": 1e5, "rope_type": "llama3", **LLAMA3}},
            {"rope_type": "llama3", **LLAMA3},
        ),
    ],
)
def test_rope_is_read_in_the_older_words_and_in_transformers_5s(change, scaling):
    s = family_of(LLAMA).settings({**LLAMA, **change})
    assert (s.rope_scaling, s.rotary_base) == (scaling, 1e5)


@pytest.mark.parametrize(
    ("base", "change", "word"),
    [
        (QWEN2, {"use_sliding_window": True}, "sliding-window"),
        (QWEN2, {"dual_chunk_attention_config": {"chunk_size": 64}}, "dual_chunk_attention_config"),
        (QWEN3_MOE, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (QWEN3, {"compression_config": {"format": "float-quantized"}}, "compression_config"),
        (QWEN3, {"is_causal": False}, "is_causal"),
        (QWEN2, {"rope_parameters": {"rope_type": "default", "mrope_section": [8, 4, 4]}}, "mrope_section"),
        (QWEN3, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        (GLM, {"sliding_window": 4096}, "sliding_window"),
        (QWEN3_MOE, {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        (QWEN3_MOE, {"num_experts": None}, "num_experts"),
        (QWEN3_MOE, {"moe_intermediate_size": None}, "moe_intermediate_size"),
        (QWEN3_MOE, {"num_experts_per_tok": 1}, "norm_topk_prob"),
        (QWEN3_MOE, {"attention_bias": True}, "attention_bias"),
        (QWEN2, {"head_dim": 32}, "head_dim"),
        (GLM, {"tie_word_embeddings": True}, "tie_word_embeddings"),
        (GLM, {"norm_topk_prob": False}, "norm_topk_prob"),
        (GLM, {"num_experts_per_tok": 1}, "norm_topk_prob"),
        (GLM, {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 4}, "topk_group"),
        (GLM, {"n_routed_experts": None}, "n_routed_experts"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window"),
        (LLAMA, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        (
            QWEN3,
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}},
            "yarn.*original_max_position",
        ),
        (QWEN3, {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e6}}, "longrope"),
        (QWEN3, {"use_sliding_window": True}, "sliding-window"),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        (QWEN3, {"attention_bias": True}, "attention_bias"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}}, "high_freq_factor"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA, {"attention_dropout": 0.1}, "attention_dropout"),
        (LLAMA, {"pretraining_tp": 2}, "pretraining_tp"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA, {"hidden_size": None}, "hidden_size"),
        (LLAMA, {"max_position_embeddings": None}, "max_position_embeddings"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(base, change, word):
    hf = {**base, **change}
    with pytest.raises(ConfigError, match=word):
        family_of(hf).settings(hf)


def test_all_refusals_come_at_once():
    hf = {**LLAMA, "mlp_bias": True, "hidden_act": "gelu"}
    with pytest.raises(ConfigError) as error:
        family_of(hf).settings(hf)
    assert len(error.value.problems) == 2


@pytest.mark.parametrize(
    "hf", [{"model_type": "gpt2"}, {**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, {}]
)
def test_an_unknown_architecture_lists_what_is_supported(hf):
    with pytest.raises(ConfigError, match=r"llama .*qwen3"):
        family_of(hf)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.model_type)
def test_every_hf_name_belongs_to_one_tensor(family):
    hf = {**CONFIGS[family.model_type], "tie_word_embeddings": False}
    names = family.name_map(family.settings(hf))
    seen = []
    for megatron in names.megatron_names():
        entry = names.to_hf(megatron)
        assert len(entry.hf) == NUM_HF[entry.kind]
        seen += entry.hf
    assert len(seen) == len(set(seen)) and seen == names.hf_names()


def test_a_tied_head_has_no_name():
    tied = family_of(QWEN3).name_map(family_of(QWEN3).settings(QWEN3))
    assert "lm_head.weight" not in tied.hf_names()
    with pytest.raises(KeyError):
        tied.to_hf("output_layer.weight")
