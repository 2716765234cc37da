"""Checks of what is computed again in the backward pass: Megatron's --recompute-granularity and what belongs to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vime.config import Config
from vime.config.parallel import parallel_sizes

_OF_ANY_MODEL = ("core_attn", "layernorm")
_OF_EXPERTS = ("moe", "moe_act", "shared_experts")


def check_recompute(config: Config, shape: Mapping[str, Any], stage_layers: Sequence[int]) -> Iterator[str]:
    """What would not be read, is missing, or names a part that the model does not have.

    Args:
        shape: the model's TransformerConfig fields; empty when they are not known.
        stage_layers: layers of each pipeline stage; empty when they are not known.
    """
    given = config.megatron
    granularity, method = given.get("recompute_granularity"), given.get("recompute_method")
    count, modules = given.get("recompute_num_layers"), given.get("recompute_modules")
    if given.get("moe_shared_expert_overlap"):
        yield from _overlap(modules or (), shape)
    if granularity is None:
        for name in ("method", "num_layers", "modules"):
            if given.get(f"recompute_{name}"):
                yield f"--recompute-{name.replace('_', '-')} is read with --recompute-granularity only; add it"
        return
    if granularity == "full":
        yield from _full(method, count, modules, stage_layers)
        return
    for name, value in (("method", method), ("num-layers", count)):
        if value is not None:
            yield f"--recompute-{name} is {value}, but it is for --recompute-granularity full; drop it"
    yield from _modules(modules if modules is not None else ["core_attn"], shape)


def stage_layers(config: Config, shape: Mapping[str, Any]) -> Sequence[int]:
    """Layers of each pipeline stage; empty where they are not known or do not come out, which is said elsewhere."""
    stages, num_layers = parallel_sizes(config.megatron).stages, shape.get("num_layers")
    if num_layers is None or any(stages.problems(num_layers)):
        return ()
    return stages.layers(num_layers)


def _overlap(modules: Sequence[str], shape: Mapping[str, Any]) -> Iterator[str]:
    if shape and not shape.get("moe_shared_expert_intermediate_size"):
        yield "--moe-shared-expert-overlap is for shared experts, which the model does not have; drop it"
    elif "shared_experts" in modules:
        yield "--moe-shared-expert-overlap and shared_experts in --recompute-modules exclude each other; drop one"


def _full(method: Any, count: Any, modules: Any, stage_layers: Sequence[int]) -> Iterator[str]:
    if method not in ("uniform", "block"):
        yield (
            "--recompute-granularity full needs --recompute-method: uniform (all layers, --recompute-num-layers at a "
            "time), or block (the first --recompute-num-layers of each stage)"
        )
    if count is None or count < 1:
        yield f"--recompute-num-layers is {count}, but --recompute-granularity full needs a number of layers, such as 1"
    elif method == "uniform" and (odd := [n for n in stage_layers if n % count]):
        yield (
            f"--recompute-num-layers is {count}, which does not divide a pipeline stage's {odd[0]} layers; "
            "megatron-core would look for layers that are not there"
        )
    if modules:
        yield "--recompute-modules is for --recompute-granularity selective; full repeats whole layers"


def _modules(modules: Sequence[str], shape: Mapping[str, Any]) -> Iterator[str]:
    there = set(_OF_ANY_MODEL)
    has_experts = bool(shape.get("num_moe_experts"))
    if has_experts:
        there |= {"moe", "moe_act"} | (
            {"shared_experts"} if shape.get("moe_shared_expert_intermediate_size") else set()
        )
    if not has_experts or not all(shape.get("moe_layer_freq") or [0]):
        there.add("mlp")
    unknown = [name for name in modules if name not in (*_OF_ANY_MODEL, *_OF_EXPERTS, "mlp", "mla_up_proj")]
    if unknown:
        yield f"--recompute-modules names {unknown[0]!r}, which is none of {', '.join(sorted(there))}"
    elif shape and (absent := [name for name in modules if name not in there]):
        yield (
            f"--recompute-modules names {absent[0]}, which this model does not have; it has {', '.join(sorted(there))}"
        )
    if "moe" in modules and (inside := [name for name in ("moe_act", "shared_experts") if name in modules]):
        yield f"--recompute-modules names moe and {inside[0]}, which moe repeats already; drop {inside[0]}"
