"""Values of config.json that no model can be built of."""

import pytest

from tests.models.test_families import CONFIGS
from vime.errors import ConfigError
from vime.models import family_of

ODD = (None, 0, -1, 1, 3, "8", 2.5, True, [], ["x"], {}, "x", float("nan"), float("inf"), 10**12)
OPTIONAL = (
    "decoder_sparse_step",
    "mlp_only_layers",
    "rope_scaling",
    "rope_parameters",
    "rope_theta",
    "partial_rotary_factor",
    "head_dim",
    "num_local_experts",
    "quantization_config",
    "dtype",
)


@pytest.mark.parametrize("kind", CONFIGS)
def test_any_value_of_any_key_gives_a_model_or_is_refused(kind: str) -> None:
    refused = 0
    for key in [*CONFIGS[kind], *OPTIONAL]:
        for value in ODD:
            try:
                family = family_of(hf := {**CONFIGS[kind], key: value})
                settings = family.settings(hf)
            except ConfigError as error:
                assert all(problem for problem in error.problems)
                refused += 1
            else:
                assert settings.transformer["num_layers"] <= 10_000
                assert family.name_map(settings).megatron_names()
    assert refused > 100


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("glm4_moe", {"n_routed_experts": 0}, "n_routed_experts is 0, but must be a whole number at least 1"),
        ("glm4_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, more than the 4 experts there are"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ("glm4_moe", {"first_k_dense_replace": 9}, "first_k_dense_replace is 9"),
        ("glm4_moe", {"routed_scaling_factor": float("nan")}, "routed_scaling_factor is nan"),
        ("glm4_moe", {"n_group": 3}, "n_group is 3, which does not divide the 4 experts"),
        ("qwen3_moe", {"num_experts": -4}, "num_experts is -4"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"mlp_only_layers": [7]}, "mlp_only_layers names layer 7, but num_hidden_layers is 4"),
        ("qwen3", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ("qwen3", {"num_key_value_heads": 3}, "does not divide num_attention_heads 4"),
        ("qwen3", {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', but must be true or false"),
        ("qwen3", {"rope_parameters": {"rope_theta": -1.0}}, "rope_parameters: rope_theta is -1.0"),
        ("qwen3", {"head_dim": 31}, "head_dim is 31, but rotary embedding needs an even width"),
    ],
)
def test_what_is_wrong_is_named(kind: str, change: dict, words: str) -> None:
    hf = {**CONFIGS[kind], **change}
    with pytest.raises(ConfigError) as error:
        family_of(hf).settings(hf)
    assert words in str(error.value)


def test_all_wrong_values_are_named_at_once() -> None:
    hf = {**CONFIGS["glm4_moe"], "n_routed_experts": 0, "head_dim": "wide", "vocab_size": -3}
    with pytest.raises(ConfigError) as error:
        family_of(hf).settings(hf)
    assert len(error.value.problems) == 3
