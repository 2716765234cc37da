"""How many parameters a model has, part by part, exactly, from its settings alone.

What optimizers train and `transformers` counts as parameters: no buffers (a router's correction bias, RoPE's
frequencies) and no layers of multi-token prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vime.models.settings import ModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParameters:
    """One decoder layer's. A layer has `mlp` alone, or `router`, `experts` and perhaps `shared_experts`."""

    attention: int
    """The matrices of query, key, value and output."""
    biases: int
    """Of query, key and value."""
    norms: int
    """Before attention, before the MLP, and those of each query and key head."""
    mlp: int = 0
    router: int = 0
    experts: int = 0
    """All routed experts."""
    shared_experts: int = 0

    @property
    def matrices(self) -> int:
        """Those a matrix product reads; each is one multiply-add per token that passes it."""
        return self.attention + self.mlp + self.router + self.experts + self.shared_experts

    @property
    def total(self) -> int:
        return self.matrices + self.biases + self.norms


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """A whole model's."""

    embedding: int
    layers: tuple[LayerParameters, ...]
    final_norm: int
    head: int
    """0 where the head is the embedding."""

    @property
    def total(self) -> int:
        return self.embedding + sum(layer.total for layer in self.layers) + self.final_norm + self.head


def parameters(model: ModelSettings) -> Parameters:
    """All parameters of a model, of the true vocabulary, without padding."""
    table = model.vocab_size * model.transformer["hidden_size"]
    return Parameters(
        embedding=table,
        layers=tuple(_layer(model, i) for i in range(model.transformer["num_layers"])),
        final_norm=model.transformer["hidden_size"],
        head=0 if model.tie_word_embeddings else table,
    )


def active_parameters(model: ModelSettings) -> Parameters:
    """The parameters that one token passes: of the routed experts only those chosen for it."""
    whole, t = parameters(model), model.transformer

    def active(layer: LayerParameters) -> LayerParameters:
        if not layer.experts:
            return layer
        return replace(layer, experts=layer.experts // t["num_moe_experts"] * t["moe_router_topk"])

    return replace(whole, layers=tuple(map(active, whole.layers)))


def _layer(model: ModelSettings, i: int) -> LayerParameters:
    t = model.transformer
    hidden, width = t["hidden_size"], t["kv_channels"]
    q, kv = t["num_attention_heads"] * width, t["num_query_groups"] * width
    per_unit = (3 if t["gated_linear_unit"] else 2) * hidden  # one inner unit of an MLP
    dense = LayerParameters(
        attention=hidden * (q + 2 * kv) + q * hidden,
        biases=q + 2 * kv if t["add_qkv_bias"] else 0,
        norms=2 * hidden + (2 * width if t["qk_layernorm"] else 0),
    )
    if not model.has_experts(i):
        return replace(dense, mlp=per_unit * t["ffn_hidden_size"])
    return replace(
        dense,
        router=hidden * t["num_moe_experts"],
        experts=t["num_moe_experts"] * per_unit * t["moe_ffn_hidden_size"],
        shared_experts=per_unit * (t.get("moe_shared_expert_intermediate_size") or 0),
    )
