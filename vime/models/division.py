"""How a model is divided over training ranks, and how many parameters each of them holds: exact, without torch.

Layers are counted from 0 over the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vime.models.settings import ModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Ranks along each dimension. `data` is what the others leave over."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    """Stages of each pipeline rank."""
    group: int | None = None
    """Micro-batches that a rank's stage takes before its next stage does, where it has several; None: `pipeline`."""
    context: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    """Ranks that share each expert; None: as `tensor`."""
    sequence_parallel: bool = False
    stage_layers: Sequence[int] | None = None
    """Layers of each of the pipeline x virtual stages, in the order of the layers; None: all have the same."""

    @property
    def world_size(self) -> int:
        """All training ranks."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def etp(self) -> int:
        """Ranks that share each expert."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def dense_copies(self) -> int:
        """Ranks with the same dense parameters: they share the distributed optimizer's state."""
        return self.data * self.context

    @property
    def expert_copies(self) -> int:
        """Ranks with the same experts."""
        return max(1, self.world_size // (self.pipeline * self.expert * self.etp))

    def layers(self, rank: int, num_layers: int) -> list[range]:
        """The layers of a pipeline rank, stage by stage. Stage j belongs to rank j % pipeline."""
        stages = self.pipeline * self.virtual
        sizes = self.stage_layers or [num_layers // stages] * stages
        starts = [sum(sizes[:j]) for j in range(stages)]
        return [range(starts[j], starts[j] + sizes[j]) for j in range(rank, stages, self.pipeline)]


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameters that one rank holds: experts apart, because other ranks share them."""

    dense: int
    experts: int = 0

    @property
    def total(self) -> int:
        """Both."""
        return self.dense + self.experts

    def __add__(self, other: RankParameters) -> RankParameters:
        return RankParameters(self.dense + other.dense, self.experts + other.experts)


def rank_parameters(model: ModelSettings, division: Division, pipeline_rank: int) -> RankParameters:
    """What one rank of this pipeline stage holds; a tied head on another stage than the embedding is a second copy."""
    t = model.transformer
    stages = division.layers(pipeline_rank, t["num_layers"])
    total = RankParameters(0)
    for layer in (i for stage in stages for i in stage):
        total += layer_parameters(model, division, layer)
    vocabulary = padded_rows(model.vocab_size, division.tensor) * t["hidden_size"]
    first, last = pipeline_rank == 0, pipeline_rank == division.pipeline - 1
    if first:
        total += RankParameters(vocabulary)
    if last:
        head_is_own = not model.tie_word_embeddings or not first
        total += RankParameters(t["hidden_size"] + (vocabulary if head_is_own else 0))
    return total


def critic_parameters(model: ModelSettings, division: Division, pipeline_rank: int) -> RankParameters:
    """What one rank holds of a critic with the model's layers: one number in the place of the head's rows."""
    total = rank_parameters(model, division, pipeline_rank)
    if pipeline_rank != division.pipeline - 1:
        return total
    hidden = model.transformer["hidden_size"]
    head_is_own = not model.tie_word_embeddings or division.pipeline > 1
    rows = padded_rows(model.vocab_size, division.tensor) if head_is_own else 0
    return total + RankParameters((1 - rows) * hidden + 1)


def padded_rows(vocab_size: int, tensor: int) -> int:
    """Rows of the embedding that one tensor-parallel rank holds."""
    return -(-vocab_size // tensor)


def layer_parameters(model: ModelSettings, division: Division, layer: int) -> RankParameters:
    """One rank's part of a decoder layer."""
    t, tp = model.transformer, division.tensor
    hidden, head = t["hidden_size"], t["kv_channels"]
    q = t["num_attention_heads"] * head // tp
    qkv = q + 2 * t["num_query_groups"] * head // tp
    matrices = 3 if t["gated_linear_unit"] else 2
    dense = hidden * (qkv + q) + 2 * hidden  # and the two norms
    if t.get("add_qkv_bias"):
        dense += qkv
    if t.get("qk_layernorm"):
        dense += 2 * head
    if not model.has_experts(layer):
        return RankParameters(dense + matrices * hidden * t["ffn_hidden_size"] // tp)
    experts = t["num_moe_experts"]
    shared = t.get("moe_shared_expert_intermediate_size") or 0
    dense += experts * hidden + matrices * hidden * shared // tp  # the router is whole on every rank
    expert = matrices * hidden * t["moe_ffn_hidden_size"] // division.etp
    return RankParameters(dense, experts // division.expert * expert)
