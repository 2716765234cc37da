"""What became of a flag of slime's or vllm-project/vime's, for those who bring a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

FLAGS_FILE = Path(__file__).with_name("upstream_flags.yaml")


def read_flags() -> dict[str, dict[str, Mapping[str, Any]]]:
    """upstream_flags.yaml: heading -> flag, without dashes -> what is to be said of it (nothing: the same name)."""
    groups = yaml.safe_load(FLAGS_FILE.read_text(encoding="utf-8"))
    return {heading: {name: said or {} for name, said in flags.items()} for heading, flags in groups.items()}


def what_became_of(name: str) -> str | None:
    """The end of a sentence that begins with the flag; None for a flag that was not theirs.

    Args: name: without dashes, and not one of vime's settings.
    """
    said = next((flags[name] for flags in read_flags().values() if name in flags), None)
    if said is None:
        engine = "the engine is vLLM, whose settings begin with --vllm- (--help-vllm)"
        return f"is not here: {engine}" if name.startswith("sglang-") else None
    here, why = said.get("here"), said.get("why", "")
    if here:
        return f"is called --{here} here" + (f": {why}" if why else "")
    return f"is not here{' yet' if said.get('later') else ''}: {why}"
