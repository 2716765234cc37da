"""Megatron settings that were given but that nobody would read, as the run is configured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from vime.config import Config

Rule: TypeAlias = tuple[tuple[str, ...], Callable[[Config, Mapping[str, Any]], bool], str]

# (settings by field name, when nobody reads them given the run's settings and the model's shape, what to do about it)
_RULES: tuple[Rule, ...] = (
    (
        ("min_lr",),
        lambda c, shape: c.train.lr_decay_style == "constant",
        "--lr-decay-style constant does not decay; choose another style",
    ),
    (
        ("apply_wd_to_qk_layernorm",),
        lambda c, shape: bool(shape) and not shape.get("qk_layernorm"),
        "the model has no norms of queries and keys",
    ),
    (
        ("apply_wd_to_qk_layernorm",),
        lambda c, shape: c.megatron.get("weight_decay") == 0,
        "--weight-decay is 0",
    ),
    (
        ("deallocate_pipeline_outputs",),
        lambda c, shape: c.megatron.get("pipeline_model_parallel_size", 1) == 1,
        "a single stage hands nothing on; add --pipeline-model-parallel-size",
    ),
    (
        ("bucket_size",),
        lambda c, shape: not c.megatron.get("overlap_grad_reduce"),
        "gradients are in one bucket; add --overlap-grad-reduce",
    ),
    (
        ("pad_buckets_for_high_nccl_busbw",),
        lambda c, shape: not c.megatron.get("use_distributed_optimizer", True),
        "it is for the distributed optimizer",
    ),
)


def unread_megatron_settings(config: Config, shape: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each given setting that has no effect.

    Args: shape: the model's TransformerConfig fields; empty when they are not known.
    """
    for names, is_unread, remedy in _RULES:
        for name in names:
            value = config.megatron.get(name)
            if value is not None and value is not False and is_unread(config, shape):
                yield f"--{name.replace('_', '-')} is {value!r}, but nothing reads it: {remedy}"
