"""Whether the values of config.json are of the kind, the size and the relation that a model can be built of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

_MOST_LAYERS = 10_000
_MOST = 2**31 - 1
# Key -> (least, most, whether null is as good as leaving it out). Whole numbers.
_COUNTS: Mapping[str, tuple[int, int, bool]] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), (1, _MOST, False)),
    **dict.fromkeys(("num_attention_heads", "max_position_embeddings"), (1, _MOST, False)),
    "num_hidden_layers": (1, _MOST_LAYERS, False),
    **dict.fromkeys(("num_key_value_heads", "head_dim"), (1, _MOST, True)),
    **dict.fromkeys(("num_experts", "num_local_experts"), (1, _MOST, True)),
    **dict.fromkeys(("n_routed_experts", "num_experts_per_tok"), (1, _MOST, False)),
    **dict.fromkeys(("moe_intermediate_size", "n_shared_experts", "decoder_sparse_step"), (1, _MOST, False)),
    "first_k_dense_replace": (0, _MOST, False),
    **dict.fromkeys(("n_group", "topk_group"), (1, _MOST, True)),
    "num_nextn_predict_layers": (0, _MOST_LAYERS, True),
}
# The same for other numbers, which must be above the first.
_NUMBERS: Mapping[str, tuple[float, float, bool]] = {
    "rms_norm_eps": (0, 1, False),
    "rope_theta": (0, math.inf, False),
    "partial_rotary_factor": (0, 1, True),
    "routed_scaling_factor": (0, math.inf, False),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), (0, math.inf, True)),
    "original_max_position_embeddings": (0, math.inf, True),
}
_SWITCHES = ("tie_word_embeddings", "norm_topk_prob", "use_qk_norm", "attention_bias", "use_sliding_window")
_LISTS: Mapping[str, type] = {"layer_types": str, "mlp_only_layers": int}
_OBJECTS = ("rope_scaling", "rope_parameters")


def value_problems(hf: Mapping[str, Any]) -> list[str]:
    """What is wrong with config.json's values themselves, one sentence each. Keys that nobody reads are not looked at.

    Args: hf: the file's contents.
    """
    found = [*_kinds(hf)]
    for name in _OBJECTS:
        if isinstance(inner := hf.get(name), Mapping):
            found += [f"{name}: {problem}" for problem in _kinds(inner)]
        elif inner is not None:
            found.append(f"{name} is {inner!r}, but must be an object")
    return found or [*_relations(hf)]


def _kinds(hf: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(hf.keys() & (_COUNTS.keys() | _NUMBERS.keys())):
        is_count, value = key in _COUNTS, hf[key]
        least, most, may_be_null = _COUNTS[key] if is_count else _NUMBERS[key]
        if value is None and may_be_null:
            continue
        is_number = isinstance(value, int if is_count else int | float) and not isinstance(value, bool)
        if is_number and (least <= value if is_count else least < value) and value <= most and math.isfinite(value):
            continue
        bounds = f"{'at least' if is_count else 'above'} {least:g}" + (
            f" and at most {most}" if most < math.inf else ""
        )
        yield f"{key} is {value!r}, but must be a {'whole number' if is_count else 'number'} {bounds}"
    for key in _SWITCHES:
        if not isinstance(hf.get(key), bool | None):
            yield f"{key} is {hf[key]!r}, but must be true or false"
    for key, kind in _LISTS.items():
        value = hf.get(key)
        if value is not None and not (isinstance(value, list | tuple) and all(isinstance(v, kind) for v in value)):
            yield f"{key} is {value!r}, but must be a list of {'layer numbers' if kind is int else 'names'}"


def _relations(hf: Mapping[str, Any]) -> Iterator[str]:
    read = hf.get
    heads, groups = read("num_attention_heads"), read("num_key_value_heads")
    if heads and groups and heads % groups:
        yield f"num_key_value_heads is {groups}, which does not divide num_attention_heads {heads}"
    if heads and not read("head_dim") and (hidden := read("hidden_size", 0)) < heads:
        yield f"hidden_size is {hidden}, less than num_attention_heads {heads}; give head_dim"
    if (width := read("head_dim")) and width % 2:
        yield f"head_dim is {width}, but rotary embedding needs an even width"
    experts = read("n_routed_experts") or read("num_experts") or read("num_local_experts")
    if experts and (chosen := read("num_experts_per_tok")) and chosen > experts:
        yield f"num_experts_per_tok is {chosen}, more than the {experts} experts there are"
    parts, of_them = read("n_group"), read("topk_group")
    if experts and parts and experts % parts:
        yield f"n_group is {parts}, which does not divide the {experts} experts"
    if parts and of_them and of_them > parts:
        yield f"topk_group is {of_them}, more than n_group {parts}"
    layers, dense = read("num_hidden_layers"), read("mlp_only_layers") or ()
    if layers and (outside := [i for i in dense if not 0 <= i < layers]):
        yield f"mlp_only_layers names layer {outside[0]}, but num_hidden_layers is {layers}"
    if layers and (leading := read("first_k_dense_replace") or 0) >= layers:
        yield f"first_k_dense_replace is {leading}, which leaves none of num_hidden_layers {layers} with experts"
    kinds = read("layer_types")
    if layers and kinds and len(kinds) != layers:
        yield f"layer_types has {len(kinds)} entries for num_hidden_layers {layers}"
