"""Rotary position embedding as config.json describes it, in transformers 5's words or the older ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SCALINGS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""What can be done besides plain RoPE, and the numbers it needs. Frequencies that depend on a sequence's length
(dynamic, longrope) cannot: a packed micro-batch has one table of angles for all its sequences."""


def rotary_base(hf: Mapping[str, Any]) -> float:
    """RoPE's base; transformers' default is 1e4."""
    return float(_parameters(hf).get("rope_theta", hf.get("rope_theta", 10_000.0)))


def rotary_percent(hf: Mapping[str, Any], default: float) -> float:
    """Part of each head that is rotated."""
    own = hf.get("partial_rotary_factor")
    return float(_parameters(hf).get("partial_rotary_factor", default if own is None else own))


def rope_scaling(hf: Mapping[str, Any]) -> dict[str, Any] | None:
    """How the frequencies are changed for contexts longer than the model was first trained on; None for plain RoPE."""
    parameters = _parameters(hf)
    kind = _kind(parameters)
    others = {k: v for k, v in parameters.items() if k not in ("type", "rope_theta", "partial_rotary_factor")}
    return None if kind == "default" else {**others, "rope_type": kind}


def unsupported_rope(hf: Mapping[str, Any], *, whole_heads: bool) -> list[str]:
    """Sentences for RoPE variants that cannot be done. Args: whole_heads: the family rotates all of each head."""
    problems = []
    if whole_heads and (percent := rotary_percent(hf, 1.0)) != 1.0:
        problems.append(f"partial_rotary_factor is {percent}; only 1 is supported")
    parameters = _parameters(hf)
    kind = _kind(parameters)
    if kind != "default" and kind not in SCALINGS:
        problems.append(f"it asks for RoPE of type {kind!r}; plain RoPE and {', '.join(SCALINGS)} are supported")
    if "mrope_section" in parameters:
        problems.append("it asks for RoPE in sections (mrope_section), which is for images; only text is supported")
    if layers := [name for name, value in parameters.items() if isinstance(value, Mapping)]:
        problems.append(f"it has RoPE of its own for {', '.join(layers)}; one for all layers is supported")
    missing = [name for name in SCALINGS.get(kind, ()) if not isinstance(parameters.get(name), int | float)]
    if missing:
        problems.append(f"RoPE of type {kind!r} needs {', '.join(missing)} in rope_parameters or rope_scaling")
    return problems


def _parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}


def _kind(parameters: Mapping[str, Any]) -> str:
    return str(parameters.get("rope_type", parameters.get("type", "default")))
