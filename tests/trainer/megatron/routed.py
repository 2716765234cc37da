"""What a policy chooses itself, and transformers' models that use given experts."""

import functools

import numpy as np
import torch

from vime.trainer.megatron import forward
from vime.trainer.megatron.batches.routing_replay import RolloutRouting
from vime.types import RoutedExperts


def own_experts(trainer, batch):
    """What the policy of one process chooses freely, for every token."""
    routing = RolloutRouting(trainer._routers, batch, records=True)
    micro_batches = [micro for step in batch.steps for micro in step[0]]
    every = np.ones(len(batch.tokens), bool)
    every[batch.cu_seqlens[:-1]] = False
    forward.shared_log_probs(
        trainer._forward,
        batch.tokens,
        batch.cu_seqlens,
        micro_batches,
        every,
        layout=trainer._layout,
        temperature=1.0,
        routing=routing.old_policy(),
    )
    recorded = routing.training().recorded
    rows = np.zeros((len(batch.tokens), trainer._routers.num_layers, trainer._routers.top_k), np.uint8)
    for samples, chosen in recorded.items():
        places = np.concatenate([np.arange(batch.cu_seqlens[i], batch.cu_seqlens[i + 1]) for i in samples])
        rows[np.ix_(places, trainer._routers.layers)] = chosen.numpy()
    return RoutedExperts(rows, batch.lengths)


def gates(model):
    """(layer, router) of a transformers model."""
    return [(k, layer.mlp.gate) for k, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")]


def force(model, rows):
    """From now on the model's tokens go to these experts. Args: rows: [known tokens, layers, k]."""
    for layer, gate in gates(model):
        gate.forward = functools.partial(
            _forced, gate, type(gate).forward, torch.from_numpy(rows[:, layer].astype(int))
        )


def _forced(gate, original, rows, hidden):
    logits, _, chosen = original(gate, hidden)
    chosen = torch.cat([rows, chosen[len(rows) :]])
    if "Glm4" in type(gate).__name__:
        weights = logits.float().sigmoid().gather(1, chosen)
        return logits, weights / (weights.sum(-1, keepdim=True) + 1e-20) * gate.routed_scaling_factor, chosen
    weights = logits.float().softmax(-1).gather(1, chosen)
    return logits, weights / weights.sum(-1, keepdim=True) if gate.norm_topk_prob else weights, chosen
