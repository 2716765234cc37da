"""Parameter counts against transformers' own modules, and against the known sizes of the models the recipes name."""

import pytest

from vime.models import family_of
from vime.models.parameters import active_parameters, parameters

TINY = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
MODELS = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "head_dim": 12},
    "qwen3": {"model_type": "qwen3"},
    "qwen3-moe": {"model_type": "qwen3_moe", "num_experts": 6, **EXPERTS},
    "qwen3-moe-mixed": {"model_type": "qwen3_moe", "num_experts": 6, **EXPERTS, "mlp_only_layers": [1]},
    "glm": {"model_type": "glm4_moe", "n_routed_experts": 6, "n_shared_experts": 2, **EXPERTS},
    "glm-biased": {
        "model_type": "glm4_moe",
        "n_routed_experts": 6,
        **EXPERTS,
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": 2,
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_counts_the_same(name):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = {"tie_word_embeddings": False, **TINY, **MODELS[name]}
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf))
    model = family_of(hf).settings(hf)
    counts = parameters(model)
    sizes = {n: p.numel() for n, p in module.named_parameters()}
    assert counts.total == sum(sizes.values())

    def of(*words: str, layer: int) -> int:
        return sum(size for n, size in sizes.items() if f"layers.{layer}." in n and any(w in n for w in words))

    for i, layer in enumerate(counts.layers):
        assert layer.norms == of("norm", layer=i)
        assert layer.biases == of("bias", layer=i)
        assert layer.attention == of("self_attn", layer=i) - of("self_attn.q_norm", "self_attn.k_norm", "bias", layer=i)
        assert layer.router == of("mlp.gate.", layer=i)
        assert layer.experts == of("mlp.experts.", layer=i)
        assert layer.shared_experts == of("mlp.shared_experts.", layer=i)
        assert layer.mlp == of("mlp.", layer=i) - layer.router - layer.experts - layer.shared_experts
        assert layer.total == of("", layer=i)


def test_a_token_passes_the_experts_chosen_for_it_alone():
    hf = {**TINY, **MODELS["glm"]}
    whole, active = (count(family_of(hf).settings(hf)) for count in (parameters, active_parameters))
    # Layer 0 is dense; the two others leave out 4 of 6 experts of 3 matrices each.
    assert whole.total - active.total == 2 * 4 * 3 * 48 * 24
    assert whole.layers[0] == active.layers[0]


def qwen(hidden, layers, heads, kv, ffn, *, tied, **more):
    """A Qwen3 of 128-wide heads."""
    return {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": 128,
        "intermediate_size": ffn,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": tied,
        **more,
    }


def glm(hidden, layers, ffn, experts, expert_ffn, *, dense, qk_norm):
    """A GLM-4.5."""
    return {
        **qwen(hidden, layers, 96, 8, ffn, tied=False),
        "model_type": "glm4_moe",
        "vocab_size": 151_552,
        "attention_bias": True,
        "use_qk_norm": qk_norm,
        "n_routed_experts": experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": expert_ffn,
        "n_shared_experts": 1,
        "first_k_dense_replace": dense,
    }


A3B = {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


@pytest.mark.parametrize(
    ("hf", "total", "active"),
    [
        # Totals: counted by transformers 5.24 from the published configs. Active, in billions, with embeddings.
        pytest.param(qwen(1024, 28, 16, 8, 3072, tied=True), 596_049_920, 0.60, id="Qwen3-0.6B"),
        pytest.param(qwen(2048, 28, 16, 8, 6144, tied=True), 1_720_574_976, 1.72, id="Qwen3-1.7B"),
        pytest.param(qwen(2560, 36, 32, 8, 9728, tied=True), 4_022_468_096, 4.02, id="Qwen3-4B"),
        pytest.param(qwen(4096, 36, 32, 8, 12_288, tied=False), 8_190_735_360, 8.19, id="Qwen3-8B"),
        pytest.param(qwen(2048, 48, 32, 4, 6144, tied=False, **A3B), 30_532_122_624, 3.35, id="Qwen3-30B-A3B"),
        pytest.param(
            glm(4096, 46, 10_944, 128, 1408, dense=1, qk_norm=False), 106_852_245_504, 13.42, id="GLM-4.5-Air"
        ),
        pytest.param(glm(5120, 92, 12_288, 160, 1536, dense=3, qk_norm=True), 352_797_814_784, 33.63, id="GLM-4.5"),
    ],
)
def test_known_models_have_their_known_sizes(hf, total, active):
    model = family_of(hf).settings(hf)
    assert parameters(model).total == total
    assert round(active_parameters(model).total / 1e9, 2) == active
