"""Model families: one file each, picked by what a checkpoint's config.json says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.errors import ConfigError
from vime.models.base import Family
from vime.models.glm4_moe import Glm4Moe
from vime.models.llama import Llama
from vime.models.names import Kind, NameMap, Names, Rule
from vime.models.qwen2 import Qwen2
from vime.models.qwen3 import Qwen3
from vime.models.qwen3_moe import Qwen3Moe
from vime.models.settings import ModelSettings

FAMILIES: tuple[Family, ...] = (Llama(), Qwen2(), Qwen3(), Qwen3Moe(), Glm4Moe())


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint.

    Args: hf_config: its config.json.
    Raises: ConfigError naming what is supported.
    """
    architectures = hf_config.get("architectures")
    if not isinstance(architectures, list | tuple | None):
        raise ConfigError(f"config.json: architectures is {architectures!r}, but must be a list of class names")
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
