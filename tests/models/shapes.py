"""Settings of the published models, as their families would give them."""

from typing import Any

from vime.models import ModelSettings


def _settings(
    hidden: int, layers: int, heads: int, groups: int, ffn: int, *, vocab: int = 151936, tied: bool = False, **more: Any
) -> ModelSettings:
    transformer = {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": 128,
        "gated_linear_unit": True,
        "qk_layernorm": True,
        "add_qkv_bias": False,
        **more,
    }
    return ModelSettings(
        transformer=transformer,
        vocab_size=vocab,
        max_position_embeddings=40960,
        rotary_base=1e6,
        tie_word_embeddings=tied,
        dtype="bfloat16",
    )


def _experts(count: int, width: int, **more: Any) -> dict[str, Any]:
    return {"num_moe_experts": count, "moe_router_topk": 8, "moe_ffn_hidden_size": width, **more}


QWEN3_06B = _settings(1024, 28, 16, 8, 3072, tied=True)
QWEN3_17B = _settings(2048, 28, 16, 8, 6144, tied=True)
QWEN3_4B = _settings(2560, 36, 32, 8, 9728, tied=True)
QWEN3_8B = _settings(4096, 36, 32, 8, 12288)
QWEN3_30B = _settings(2048, 48, 32, 4, 6144, moe_layer_freq=[1] * 48, **_experts(128, 768))
QWEN3_30B_6_LAYERS = _settings(2048, 6, 32, 4, 6144, moe_layer_freq=[1] * 6, **_experts(128, 768))
GLM_45_AIR = _settings(
    4096,
    46,
    96,
    8,
    10944,
    vocab=151552,
    qk_layernorm=False,
    add_qkv_bias=True,
    moe_layer_freq=[0] + [1] * 45,
    **_experts(128, 1408, moe_shared_expert_intermediate_size=1408),
)
GLM_45 = _settings(
    5120,
    92,
    96,
    8,
    12288,
    vocab=151552,
    add_qkv_bias=True,
    moe_layer_freq=[0] * 3 + [1] * 89,
    **_experts(160, 1536, moe_shared_expert_intermediate_size=1536),
)
