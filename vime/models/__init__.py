"""Model families: one file each, picked by what a checkpoint's config.json says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.errors import ConfigError
from vime.models.base import Family, Kind, ModelSettings, NameMap, Names, Rule
from vime.models.llama import Llama
from vime.models.qwen3 import Qwen3

FAMILIES: tuple[Family, ...] = (Llama(), Qwen3())


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint.

    Args: hf_config: its config.json.
    Raises: ConfigError naming what is supported.
    """
    architectures = hf_config.get("architectures")
    for family in FAMILIES:
        if hf_config.get("model_type") == family.model_type and family.architecture in (
            architectures or [family.architecture]
        ):
            return family
    supported = ", ".join(f"{f.model_type} ({f.architecture})" for f in FAMILIES)
    raise ConfigError(
        f"a checkpoint of model_type {hf_config.get('model_type')!r} and architectures {architectures} cannot be "
        f"trained; supported: {supported}"
    )


__all__ = ["FAMILIES", "Family", "Kind", "ModelSettings", "NameMap", "Names", "Rule", "family_of"]
