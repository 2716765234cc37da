"""Decoder layers whose routers can be told what to choose: the way of `Packed.routing` from micro-batch to router.

A layer gets it from its micro-batch's layout, which whatever computes the layer again has, too; inside, the part with
experts hands it to the router for the one call, and keeps it where that call will be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from vime.trainer.megatron import parallel
from vime.trainer.megatron.batches.routing_replay import LayerRouting, Routers
from vime.trainer.megatron.nn.token_dispatch import ExpertLayer
from vime.trainer.megatron.settings import MegatronSettings


class RoutedMoELayer(ExpertLayer):
    """An ExpertLayer that tells its router what to choose, where `routing` is set."""

    routing: LayerRouting | None = None
    """Of the next call."""
    moe_layer_recompute: bool

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As ExpertLayer's."""
        routing = self.routing
        if routing is None:
            return super().forward(hidden_states, *args, **kwargs)
        if self.moe_layer_recompute:
            # Computed again when other micro-batches have been here.
            return tensor_parallel.checkpoint(partial(self._routed, routing), False, hidden_states)
        return self._routed(routing, hidden_states)

    def _routed(self, routing: LayerRouting, hidden_states: Tensor) -> Any:
        recompute = self.moe_layer_recompute
        self.moe_layer_recompute = False  # by what has called this
        self.router.router_replay = routing
        try:
            return super().forward(hidden_states)
        finally:
            self.router.router_replay, self.moe_layer_recompute = None, recompute


class RoutedLayer(TransformerLayer):  # type: ignore[misc]
    """A layer with a `RoutedMoELayer`."""

    replays: bool = False
    """Set where micro-batches have rows for it. Not in a layer for multi-token prediction, whose number is another's.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As TransformerLayer's."""
        routing = kwargs["packed_seq_params"].routing
        if routing is None or not self.replays:
            return super().forward(*args, **kwargs)
        self.mlp.routing = routing.of_layer(self.layer_number - 1)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.mlp.routing = None


def routers_of(chunks: Sequence[GPTModel], settings: MegatronSettings) -> Routers:
    """What of a model routes tokens on this rank. From now on its decoder layers replay what micro-batches say."""
    config = settings.transformer
    layers: list[int] = []
    free: list[int] = []
    for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):
        if isinstance(layer, RoutedLayer):
            layer.replays = True
            layers.append(layer.layer_number - 1)
        elif any(isinstance(module, TopKRouter) for module in layer.modules()):
            free.append(layer.layer_number - 1)
    shards = parallel.tp_size() if config.sequence_parallel else 1
    return Routers(
        layers=tuple(sorted(layers)),
        num_layers=config.num_layers,
        num_experts=config.num_moe_experts or 0,
        top_k=config.moe_router_topk,
        shards=shards,
        shard=parallel.tp_rank() if shards > 1 else 0,
        free=tuple(free),
    )
