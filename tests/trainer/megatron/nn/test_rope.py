"""Angles, factors and rotations against transformers' own."""

import pytest
import torch

from vime.models import family_of
from vime.trainer.megatron.nn.rope import apply_rope, inverse_frequencies

SIZES = {
    "vocab_size": 64,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
GLM = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
CASES = {
    "plain": ("llama", {"rope_type": "default"}),
    "linear": ("llama", {"rope_type": "linear", "factor": 2.0}),
    "llama3": ("llama", {"rope_type": "llama3", **LLAMA3}),
    "yarn": ("llama", {"rope_type": "yarn", **YARN}),
    "yarn-factor": ("llama", {"rope_type": "yarn", **YARN, "attention_factor": 1.3, "beta_fast": 16}),
    "half": ("glm4_moe", {"rope_type": "default", "partial_rotary_factor": 0.5}),
    "half-yarn": ("glm4_moe", {"rope_type": "yarn", **YARN, "partial_rotary_factor": 0.5}),
}


@pytest.mark.parametrize("name", CASES)
def test_heads_are_rotated_as_transformers_does(name):
    from transformers import AutoConfig
    from transformers.models.glm4_moe import modeling_glm4_moe
    from transformers.models.llama import modeling_llama

    kind, parameters = CASES[name]
    hf = {**SIZES, **GLM, "model_type": kind, "rope_parameters": {"rope_theta": 500.0, **parameters}}
    theirs, rotary = {
        "llama": (modeling_llama, modeling_llama.LlamaRotaryEmbedding),
        "glm4_moe": (modeling_glm4_moe, modeling_glm4_moe.Glm4MoeRotaryEmbedding),
    }[kind]
    q, k = torch.randn(2, 3, 100, 32, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(100)
    want = theirs.apply_rotary_pos_emb(q[None], k[None], *rotary(AutoConfig.for_model(**hf))(q, positions[None]))

    frequencies, factor = inverse_frequencies(family_of(hf).settings(hf), q.device)
    angles = positions[:, None].float() * frequencies
    cos, sin = (angles.cos() * factor)[:, None], (angles.sin() * factor)[:, None]
    for x, rotated in zip((q, k), want, strict=True):
        assert torch.equal(apply_rope(x.transpose(0, 1), cos, sin).transpose(0, 1), rotated[0])
    plain = {"rope_theta": 500.0, "partial_rotary_factor": parameters.get("partial_rotary_factor", 1.0)}
    plain_frequencies, _ = inverse_frequencies(family_of(hf).settings({**hf, "rope_parameters": plain}), q.device)
    assert torch.equal(frequencies, plain_frequencies) == (parameters["rope_type"] == "default")


def test_what_is_not_rotated_passes_and_so_do_its_gradients():
    x = torch.randn(5, 2, 8, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(5, 1, 2, dtype=torch.float64)
    assert torch.equal(apply_rope(x, angles.cos(), angles.sin())[..., 4:], x[..., 4:])
    assert torch.autograd.gradcheck(lambda y: apply_rope(y, angles.cos(), angles.sin()), (x,))
