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


@pytest.mark.parametrize(
    ("base", "change", "word"),
    [
        (QWEN3, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "yarn"),
        (QWEN3, {"use_sliding_window": True}, "sliding-window"),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        (QWEN3, {"attention_bias": True}, "attention_bias"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
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
def test_names_are_inverse_to_each_other(family):
    hf = {**(QWEN3 if family.model_type == "qwen3" else LLAMA), "tie_word_embeddings": False}
    names = family.name_map(family.settings(hf))
    seen = []
    for megatron in names.megatron_names():
        entry = names.to_hf(megatron)
        assert len(entry.hf) == {Kind.PLAIN: 1, Kind.QKV: 3, Kind.GLU: 2}[entry.kind]
        assert all(names.to_megatron(name) == megatron for name in entry.hf)
        seen += entry.hf
    assert len(seen) == len(set(seen)) and seen == names.hf_names()


def test_a_tied_head_has_no_name():
    tied = family_of(QWEN3).name_map(family_of(QWEN3).settings(QWEN3))
    assert "lm_head.weight" not in tied.hf_names()
    with pytest.raises(KeyError):
        tied.to_hf("output_layer.weight")
