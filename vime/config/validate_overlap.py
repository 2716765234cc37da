"""Checks of Megatron settings that overlap or spread the work of a training step, and need others for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def check_overlap(megatron: Mapping[str, Any]) -> Iterator[str]:
    """What lacks the setting it rests on. Args: megatron: what the user gave, by field name."""
    if megatron.get("overlap_param_gather"):
        if not megatron.get("use_distributed_optimizer", True):
            yield "--overlap-param-gather: without the distributed optimizer no weights are gathered; drop one of both"
        elif not megatron.get("overlap_grad_reduce"):
            yield "--overlap-param-gather gathers bucket by bucket, which --overlap-grad-reduce makes; give it, too"
    if megatron.get("distribute_saved_activations"):
        if megatron.get("recompute_granularity") != "full":
            yield "--distribute-saved-activations spreads what --recompute-granularity full keeps; give it, too"
        if megatron.get("sequence_parallel"):
            yield "--distribute-saved-activations: with --sequence-parallel activations are spread already; drop it"
