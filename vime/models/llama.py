"""Llama (SmolLM2 among them): grouped-query attention, gated MLP, no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vime.models.base import Family


class Llama(Family):
    """LlamaForCausalLM."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    only: ClassVar[Mapping[str, Any]] = {**Family.only, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}

    def transformer(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        return {}
