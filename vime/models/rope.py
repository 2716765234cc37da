"""Rotary position embedding as config.json describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def rotary_base(hf: Mapping[str, Any]) -> float:
    """RoPE's base, from transformers 5's `rope_parameters` or the older `rope_theta`; transformers' default is 1e4."""
    return float((hf.get("rope_parameters") or {}).get("rope_theta", hf.get("rope_theta", 10_000.0)))


def rotary_percent(hf: Mapping[str, Any], default: float) -> float:
    """Part of each head that is rotated, from `rope_parameters` or the older `partial_rotary_factor`."""
    own = hf.get("partial_rotary_factor")
    return float((hf.get("rope_parameters") or {}).get("partial_rotary_factor", default if own is None else own))


def unsupported_rope(hf: Mapping[str, Any], *, whole_heads: bool) -> list[str]:
    """Sentences for RoPE variants that cannot be done. Args: whole_heads: the family rotates all of each head."""
    problems = []
    if whole_heads and (percent := rotary_percent(hf, 1.0)) != 1.0:
        problems.append(f"partial_rotary_factor is {percent}; only 1 is supported")
    for key in ("rope_parameters", "rope_scaling"):
        parameters = hf.get(key) or {}
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind != "default":
            problems.append(f"{key} asks for RoPE scaling of type {kind!r}; only plain RoPE is supported")
    return problems
