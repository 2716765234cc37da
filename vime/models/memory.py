"""An estimate of the memory of one training device, part by part, from the settings alone.

Weights, gradients and optimizer state are exact. Activations are those that this trainer's layers keep; the parts that
come and go are bounds. What the device's driver, NCCL and the allocator take is stated as constants below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from vime.models.activations import (
    Recompute,
    largest_gradient,
    stage_numbers,
    stages_in_flight,
    working_numbers,
)
from vime.models.division import Division, RankParameters, critic_parameters, padded_rows, rank_parameters
from vime.models.parameters import parameters
from vime.models.settings import ModelSettings

GIB = 1 << 30
MIB = 1 << 20
CONTEXT_BYTES = 768 * MIB
"""A CUDA context with torch's, cuBLAS's and compiled kernels, for each process on a device."""
NCCL_GROUP_BYTES = 256 * MIB
"""Buffers of one communicator; one for each dimension with more than one rank."""
ALLOCATOR_SLACK = 0.05
"""Part of what comes and goes that the caching allocator cannot reuse."""
PROCESS_BYTES = 4 * GIB
"""Host memory of a training rank besides its tensors."""
ENGINE_WORKING_BYTES = 3 * GIB
"""Of an engine's share: its activations, CUDA graphs and context, before the KV cache gets the rest."""
HEAD_BLOCK_BYTES = 64 * MIB
"""Of the head's gradient, which goes into the gradient buffer block by block."""
_LOGITS_BYTES = 512 * MIB
_WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a step's memory depends on besides the model and its division."""

    dtype: str = "bfloat16"
    tokens: int = 8192
    """Of one rank's micro-batch, T."""
    forward_tokens: int | None = None
    """Of one without gradients, for old and reference log-probs; None: the same."""
    micro_batches: int | None = None
    """Of an optimizer step on one rank; None: enough to fill the pipeline."""
    recompute: Recompute = Recompute()  # noqa: RUF009 - frozen
    log_probs_chunk_size: int | None = None
    """Positions whose logits are held at a time; None: `default_chunk_size`."""
    use_distributed_optimizer: bool = True
    grad_reduce_in_fp32: bool = True
    optimizer_offload_fraction: float = 0.0
    """Part of the optimizer's state that lives in host memory."""
    num_host_weights: int = 0
    """Further sets of weights in host memory: a reference, a teacher, earlier versions."""
    teacher: ModelSettings | None = None
    """Of another architecture, a model of its own: on the host, and on the device for its forward pass."""
    has_critic: bool = False
    """A second model that is trained (PPO)."""
    sync_buffer_bytes: int = 512 * MIB
    """A bucket of the weight sync."""
    saves_optimizer: bool = False
    """Checkpoints hold the optimizer's state: it is gathered on the first of the ranks that share it."""
    async_save: bool = False
    """Checkpoints are copied to host memory, and written from there."""
    saves_reference: bool = False
    """Checkpoints hold a reference's weights, too."""
    ranks_per_node: int | None = None
    """None: all are on one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An inference engine: on the training devices (colocate) or on its own."""

    device_bytes: int
    utilization: float
    """vLLM's gpu_memory_utilization: the share of a device that it takes."""
    tensor: int = 1
    """Devices of one engine."""
    max_model_len: int = 0
    """Tokens its cache must hold at least: one sequence."""
    cache_bytes: int | None = None
    """Of its KV cache on each device, where that is stated (vLLM's kv_cache_memory_bytes)."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One device of one pipeline rank. All in bytes."""

    pipeline_rank: int
    parameters: RankParameters
    parts: Mapping[str, int]
    """What is there at the fullest moment, by name; `total` is their sum."""
    moments: Mapping[str, int]
    """What comes and goes in each phase of a step; the largest is the working memory."""
    host_bytes: int
    """Of host memory, by this rank."""

    @property
    def total(self) -> int:
        """At the fullest moment."""
        return sum(self.parts.values())


def estimate(
    model: ModelSettings, division: Division, training: Training, engine: Engine | None = None
) -> list[DeviceMemory]:
    """One entry for each pipeline rank; its tensor-, context- and data-parallel ranks have the same.

    Args: engine: one that shares the devices.
    """
    return [_device(model, division, training, engine, rank) for rank in range(division.pipeline)]


def estimate_critic(model: ModelSettings, division: Division, training: Training) -> list[DeviceMemory]:
    """The same of a critic on devices of its own: one entry for each of its pipeline ranks.

    Args: division: of the critic's ranks. training: of a step of theirs; only the critic is on them.
    """
    return [_critic_device(model, division, training, rank) for rank in range(division.pipeline)]


def _critic_device(model: ModelSettings, division: Division, training: Training, rank: int) -> DeviceMemory:
    width, own = _WIDTH[training.dtype], critic_parameters(model, division, rank)
    on_device = 1 - training.optimizer_offload_fraction
    moments = _moments(model, division, training, own, rank, has_vocabulary=False)
    fullest = max(moments.values())
    parts = {
        "critic and its gradients": (width + _gradient_width(training)) * own.total,
        "critic's optimizer state": round(on_device * _optimizer_bytes(own, division, training)),
        "working memory": fullest,
        "driver, NCCL, allocator": round(_overhead(division, fullest)),
    }
    return DeviceMemory(rank, own, parts, moments, PROCESS_BYTES + _host_bytes(own, division, training))


def _overhead(division: Division, fullest: int) -> float:
    groups = (division.tensor, division.pipeline, division.context, division.dense_copies, division.expert)
    return CONTEXT_BYTES + sum(size > 1 for size in groups) * NCCL_GROUP_BYTES + ALLOCATOR_SLACK * fullest


def _device(
    model: ModelSettings, division: Division, training: Training, engine: Engine | None, rank: int
) -> DeviceMemory:
    width = _WIDTH[training.dtype]
    own = rank_parameters(model, division, rank)
    state = _optimizer_bytes(own, division, training)
    host = _host_bytes(own, division, training) + training.num_host_weights * width * own.total
    if training.async_save and training.saves_reference:
        host += round(width * sum(_copies_shared(own, division)))
    on_device = 1 - training.optimizer_offload_fraction
    critic = critic_state = 0
    if training.has_critic:
        of_critic = critic_parameters(model, division, rank)
        host += _host_bytes(of_critic, division, training)
        critic = (width + _gradient_width(training)) * of_critic.total
        critic_state = round(on_device * _optimizer_bytes(of_critic, division, training))
    moments = _moments(model, division, training, own, rank)
    if training.teacher is not None:
        taught = width * rank_parameters(training.teacher, replace(division, stage_layers=None), rank).total
        host += taught
        forward = _moments(training.teacher, replace(division, stage_layers=None), training, own, rank)
        moments["teacher's forward"] = taught + forward["forward alone"]
    if engine is not None:
        moments["weight sync"] += engine_sync_bytes(model, engine, training)
    fullest = max(moments.values())
    parts = {
        "weights": width * own.total,
        "gradients": _gradient_width(training) * own.total,
        "optimizer state": round(on_device * state),
        "critic and its gradients": critic,
        "critic's optimizer state": critic_state,
        "working memory": fullest,
        "driver, NCCL, allocator": round(_overhead(division, fullest)),
        "engine": round(engine.utilization * engine.device_bytes) if engine is not None else 0,
    }
    return DeviceMemory(rank, own, parts, moments, PROCESS_BYTES + host + training.sync_buffer_bytes)


def _gradient_width(training: Training) -> int:
    return 4 if training.grad_reduce_in_fp32 else _WIDTH[training.dtype]


def _host_bytes(own: RankParameters, division: Division, training: Training) -> int:
    """Of the host's memory, by the optimizer and by checkpoints that are being written."""
    state = _optimizer_bytes(own, division, training)
    total = training.optimizer_offload_fraction * (state + _gradient_shard_bytes(own, division, training))
    gathered, kept = _saved_state(own, division, training) if training.saves_optimizer else (0.0, 0.0)
    total += gathered
    if training.async_save:
        # Unless all of the state was gathered, all of it is copied.
        total += (gathered + kept if kept else 0) + _WIDTH[training.dtype] * sum(_copies_shared(own, division))
    return round(total)


def _saved_state(own: RankParameters, division: Division, training: Training) -> tuple[float, float]:
    """Bytes of the state in a checkpoint, three float32 numbers a parameter: a rank's mean on the node that has most.

    Returns: what is gathered from several ranks, and what is one rank's own.
    """
    stage = division.world_size // division.pipeline
    node = min(stage, training.ranks_per_node or stage)
    gathered = kept = 0.0
    for count, copies in ((own.dense, division.dense_copies), (own.experts, division.expert_copies)):
        # The first ranks of the groups that share it follow each other.
        num_bytes = 12 * count * min(stage // copies, node) / node
        if copies > 1 and training.use_distributed_optimizer:
            gathered += num_bytes
        else:
            kept += num_bytes
    return gathered, kept


def _shards(own: RankParameters, division: Division, training: Training) -> tuple[float, float]:
    """RankParameters whose optimizer state is on this rank: dense ones and experts'."""
    return _copies_shared(own, division) if training.use_distributed_optimizer else (own.dense, own.experts)


def _copies_shared(own: RankParameters, division: Division) -> tuple[float, float]:
    """Dense parameters and experts', each divided by the ranks that hold the same ones."""
    return own.dense / division.dense_copies, own.experts / division.expert_copies


def _optimizer_bytes(own: RankParameters, division: Division, training: Training) -> float:
    """Two moments, and float32 master weights beside weights of another dtype."""
    return (8 if training.dtype == "float32" else 12) * sum(_shards(own, division, training))


def _gradient_shard_bytes(own: RankParameters, division: Division, training: Training) -> float:
    """Gradients where an optimizer on the host reads them."""
    return 4 * sum(_shards(own, division, training))


def _moments(
    model: ModelSettings,
    division: Division,
    training: Training,
    own: RankParameters,
    rank: int,
    *,
    has_vocabulary: bool = True,
) -> dict[str, int]:
    """Bytes that come and go, in each phase of a step.

    Args: has_vocabulary: False for a critic alone, which has no logits and sends no weights.
    """
    t = model.transformer
    width, tokens = _WIDTH[training.dtype], training.tokens
    stages = division.layers(rank, t["num_layers"])
    kept = max(stage_numbers(model, division, layers, training.recompute) for layers in stages)
    working = max(working_numbers(model, division, layers, training.recompute) for layers in stages)
    gradient = width * max((largest_gradient(model, division, i) for layers in stages for i in layers), default=0)
    alive = stages_in_flight(division, rank, training.micro_batches)
    head = head_bytes(model, division, training) if has_vocabulary and rank == division.pipeline - 1 else 0
    forward = (training.forward_tokens or tokens) * working_numbers(model, division, stages[0], Recompute())
    # torch's AdamW takes a copy of the second moments, of the dense or of the experts' parameters at a time; the one
    # that works with the host is fused, and takes none.
    update = 0.0 if training.optimizer_offload_fraction else 4 * max(_shards(own, division, training))
    largest_tensor = padded_rows(model.vocab_size, division.tensor) * division.tensor * t["hidden_size"] * width
    return {
        "activations": round(alive * kept * tokens * width + max(head, working * tokens * width + gradient)),
        "forward alone": round(2 * forward * width) + head,
        "optimizer step": round(update),
        **({"weight sync": training.sync_buffer_bytes + 2 * largest_tensor} if has_vocabulary else {}),
    }


def head_bytes(model: ModelSettings, division: Division, training: Training) -> int:
    """What log-probs and entropy take beside the hidden states they come from: trainer/megatron/losses/log_probs.py."""
    width = _WIDTH[training.dtype]
    hidden: int = model.transformer["hidden_size"]
    rows = padded_rows(model.vocab_size, division.tensor)
    chunk = training.log_probs_chunk_size or default_chunk_size(rows, width, fused=True)
    logits: int = min(chunk, training.tokens) * rows
    hidden_states: int = 3 * training.tokens * hidden * width  # the wanted tokens', and their gradient twice
    return hidden_states + logits * _logit_bytes(width, fused=True) + HEAD_BLOCK_BYTES


def default_chunk_size(rows: int, width: int, *, fused: bool) -> int:
    """Positions whose logits, and what is computed from them, take about 512 MiB; at least 16, at most 4096.

    Args:
        rows: of the vocabulary, on one rank.
        width: bytes of a logit.
        fused: whether elementwise work on logits is compiled into one pass, as on CUDA.
    """
    fitting = _LOGITS_BYTES // (_logit_bytes(width, fused=fused) * max(rows, 1))
    return max(16, min(fitting // 16 * 16, 4096))


def _logit_bytes(width: int, *, fused: bool) -> int:
    """Held for one logit at most: it and its gradient, and several float32 copies where nothing is fused."""
    return 2 * width + (0 if fused else 20)


def engine_sync_bytes(model: ModelSettings, engine: Engine, training: Training) -> int:
    """What each device of an engine takes at a weight sync besides its share.

    vLLM keeps a module's tensors, whole, until the last of them is there, then makes its own part of the module anew
    beside the one that is replaced. A tensor keeps its whole bucket, so those at the module's two ends count whole.
    """
    t = model.transformer
    matrices = 3 if t["gated_linear_unit"] else 2
    experts = (t.get("num_moe_experts") or 0) * matrices * (t.get("moe_ffn_hidden_size") or 0)
    rows = max(model.vocab_size, experts, 2 * t["ffn_hidden_size"])
    module: int = _WIDTH[training.dtype] * rows * t["hidden_size"]
    return round(module * (1 + 1 / engine.tensor)) + 2 * training.sync_buffer_bytes


def engine_base_bytes(model: ModelSettings, tensor: int, dtype: str) -> float:
    """What an engine takes of each of its `tensor` devices without a KV cache."""
    return _WIDTH[dtype] * parameters(model).total / tensor + ENGINE_WORKING_BYTES


def engine_room_bytes(model: ModelSettings, engine: Engine, dtype: str) -> float:
    """What an engine's share of each device leaves for the KV cache; negative when its weights alone do not fit."""
    return engine.utilization * engine.device_bytes - engine_base_bytes(model, engine.tensor, dtype)


def cache_token_bytes(model: ModelSettings, tensor: int, dtype: str) -> float:
    """A token's keys and values, on each of an engine's `tensor` devices."""
    t = model.transformer
    heads: float = max(1, t["num_query_groups"] / tensor)
    token: float = 2 * t["num_layers"] * heads * t["kv_channels"] * _WIDTH[dtype]
    return token


def engine_cache_tokens(model: ModelSettings, engine: Engine, dtype: str) -> int:
    """Tokens that an engine's KV cache holds; negative when its weights alone do not fit its share."""
    room = engine_room_bytes(model, engine, dtype) if engine.cache_bytes is None else engine.cache_bytes
    return int(room / cache_token_bytes(model, engine.tensor, dtype))
