import pytest

from vime.models import family_of
from vime.models.flops import forward_flops, sample_flops

HF = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 10,
    "hidden_size": 4,
    "intermediate_size": 5,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "max_position_embeddings": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "tie_word_embeddings": True,
    "dtype": "float32",
}
EXPERTS = {"moe_intermediate_size": 3, "num_experts_per_tok": 2, "architectures": None, "tie_word_embeddings": False}
MODELS = {
    "qwen3": HF,
    "qwen3_moe": {**HF, **EXPERTS, "model_type": "qwen3_moe", "num_experts": 4},
    "glm4_moe": {**HF, **EXPERTS, "model_type": "glm4_moe", "n_routed_experts": 4, "n_shared_experts": 2},
}


def test_operations_are_those_counted_by_hand():
    model = family_of(HF).settings(HF)
    # Per token and layer: q 4x4, k and v 4x2 each, o 4x4, gate, up and down 4x5 each: 108 multiply-adds.
    # Sequences of 3 and 2: 6 + 3 attended pairs, each 4 multiply-adds for its score and 4 for its value.
    layer = 5 * 108 + 9 * 8
    assert forward_flops(model, [3, 2], num_logits=4) == 2 * (3 * layer + 4 * 4 * 10)


def test_samples_cost_together_what_their_batch_costs():
    model = family_of(HF).settings(HF)
    each = sample_flops(model, [3, 2], [2, 1])
    assert each == [forward_flops(model, [3], 2), forward_flops(model, [2], 1)]
    assert sum(each) == forward_flops(model, [3, 2], 3)


@pytest.mark.parametrize("name", MODELS)
def test_torch_counts_the_same_in_a_transformers_model(name):
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM

    # The eager ways compute each expert on its own tokens, and the whole square of attention scores.
    config = AutoConfig.for_model(**MODELS[name])
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    length = 7
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(torch.arange(length)[None])
    model = family_of(MODELS[name]).settings(MODELS[name])
    square = 3 * 4.0 * (length * length - length * (length + 1) // 2) * 4
    rope = counter.get_total_flops() - forward_flops(model, [length], length) - square
    assert 0 <= rope <= 2 * length * 2, "what is left is the table of RoPE's angles"
