"""A checkpoint's architecture, in Megatron's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """What a family reads out of config.json."""

    transformer: Mapping[str, Any]
    """Fields of megatron-core's TransformerConfig; `activation_func` is the name of a torch.nn.functional. A model with
    experts has `num_moe_experts`, and in `moe_layer_freq` a 1 for each layer with experts and a 0 for each without."""
    vocab_size: int
    max_position_embeddings: int
    rotary_base: float
    rotary_percent: float = 1.0
    """Part of each head that is rotated, from its first element on."""
    rope_scaling: Mapping[str, Any] | None = None
    """Changed frequencies for longer contexts, in transformers' words (`rope_type`, `factor`, ...); None: plain."""
    tie_word_embeddings: bool
    dtype: str
    """torch dtype name of the checkpoint's tensors: "float32", "bfloat16", "float16"."""
    num_mtp_layers: int = 0
    """Multi-token-prediction layers behind the last one in the checkpoint: kept there as they are, and not trained."""

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts. Args: layer: counted from 0 over the whole model."""
        return bool(self.transformer.get("num_moe_experts") and self.transformer["moe_layer_freq"][layer])
