"""Bytes of activations that a backward pass needs, layer by layer: what this trainer's own layers keep.

T tokens of one rank's micro-batch, H hidden size, Q and K widths of all query and of all key heads, F of the MLP.
Counts are numbers kept a token unless bytes are said. Statistics of a few bytes a token (norms, softmax) are counted
where they are not small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vime.models.division import Division
from vime.models.settings import ModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Megatron's --recompute-granularity and what belongs to it."""

    granularity: str | None = None
    """None, "full" or "selective"."""
    method: str | None = None
    """Of full: "uniform" or "block"."""
    num_layers: int = 1
    """Of full: layers that are recomputed at a time (uniform), or that are recomputed at all (block)."""
    modules: Sequence[str] = ("core_attn",)
    """Of selective."""


def layer_numbers(model: ModelSettings, division: Division, layer: int, recompute: Recompute) -> float:
    """Numbers kept a token by one layer with selective recomputation, or with none."""
    t, tp = model.transformer, division.tensor
    h = t["hidden_size"] / (tp if division.sequence_parallel else 1)
    q = t["num_attention_heads"] * t["kv_channels"] / tp
    k = t["num_query_groups"] * t["kv_channels"] / tp
    skipped = set(recompute.modules) if recompute.granularity == "selective" else set()
    kept: float = 2 * h  # what the two norms take in
    kept += 0 if "layernorm" in skipped else 2 * h  # what they give out
    kept += q + 2 * k  # the product with the qkv matrix
    kept += q if t.get("qk_layernorm") else 0  # the query heads' norm takes a copy of its part
    kept += q + k  # rotated queries and keys; recomputing attention keeps those before the rotation instead
    kept += q  # attention's result
    if not model.has_experts(layer):
        return kept + (0 if "mlp" in skipped else _mlp(t["ffn_hidden_size"] / tp, gated=t["gated_linear_unit"]))
    if "moe" in skipped:
        return kept
    tokens = 1 / (tp if division.sequence_parallel else 1)  # of T, before the experts' exchange
    routed = tokens * t["moe_router_topk"] * division.etp
    f = t["moe_ffn_hidden_size"] / division.etp
    of_expert = t["hidden_size"] + _mlp(f, gated=t["gated_linear_unit"]) - (f if "moe_act" in skipped else 0)
    kept += routed * of_expert + tokens * 8 * t["num_moe_experts"]  # the router works in float32
    if (shared := t.get("moe_shared_expert_intermediate_size")) and "shared_experts" not in skipped:
        kept += _mlp(shared / tp, gated=t["gated_linear_unit"])
    return kept


def largest_gradient(model: ModelSettings, division: Division, layer: int) -> int:
    """Numbers of the largest tensor of a layer, whose gradient exists before it is added to Megatron's buffer."""
    t = model.transformer
    matrices = 2 if t["gated_linear_unit"] else 1
    if not model.has_experts(layer):
        return int(matrices * t["hidden_size"] * t["ffn_hidden_size"] // division.tensor)
    own = t["num_moe_experts"] // division.expert
    return int(own * matrices * t["hidden_size"] * t["moe_ffn_hidden_size"] // division.etp)


def _mlp(width: float, *, gated: bool) -> float:
    """The first matrix's product, and the activation of it that goes into the second."""
    return (3 if gated else 2) * width


def stage_numbers(model: ModelSettings, division: Division, layers: range, recompute: Recompute) -> float:
    """Numbers kept a token by a stage's layers between its forward and its backward pass."""
    if recompute.granularity != "full":
        return sum(layer_numbers(model, division, i, recompute) for i in layers)
    hidden: float = model.transformer["hidden_size"] / (division.tensor if division.sequence_parallel else 1)
    if recompute.method == "block":
        whole = layers[recompute.num_layers :]
        kept = sum(layer_numbers(model, division, i, Recompute()) for i in whole)
        return hidden * (len(layers) - len(whole)) + kept
    return hidden * -(-len(layers) // recompute.num_layers)


def working_numbers(model: ModelSettings, division: Division, layers: range, recompute: Recompute) -> float:
    """Numbers a token that come and go in a stage's backward pass: what is recomputed at a time, and gradients."""
    if not layers:
        return 0.0
    kept = {i: layer_numbers(model, division, i, Recompute()) for i in layers}
    gradients = max(kept.values()) / 2  # of the largest tensors of a layer, each freed soon
    if recompute.granularity != "full":
        return gradients
    at_a_time = recompute.num_layers if recompute.method == "uniform" else 1
    starts = range(layers.start, layers.stop, at_a_time)
    return gradients + max(sum(kept[i] for i in layers[s - layers.start :][:at_a_time]) for s in starts)


def stages_in_flight(division: Division, pipeline_rank: int, micro_batches: int | None) -> int:
    """Most stages of a rank whose activations are alive at once, in Megatron's one-forward-one-backward schedules.

    Args: micro_batches: of a step; None: at least as many as that takes.
    """
    behind = division.pipeline - pipeline_rank
    most = behind
    if division.virtual > 1:
        most = 2 * (behind - 1) + (division.virtual - 1) * (division.group or division.pipeline) + 1
    return most if micro_batches is None else min(most, micro_batches * division.virtual)
