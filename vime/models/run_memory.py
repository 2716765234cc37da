"""What the memory estimates need to know of a run, read off its settings."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from vime.config import Config
from vime.config.critic_ranks import critic_layout, critic_ranks
from vime.config.estimators import needs_critic, needs_reference
from vime.config.hf_weights import read_json_object
from vime.config.parallel import parallel_sizes
from vime.config.validate_cluster import engine_devices
from vime.models import family_of
from vime.models.activations import Recompute
from vime.models.division import Division
from vime.models.memory import (
    CONTEXT_BYTES,
    NCCL_GROUP_BYTES,
    DeviceMemory,
    Engine,
    Training,
    cache_token_bytes,
    engine_base_bytes,
    engine_sync_bytes,
    estimate,
    estimate_critic,
)
from vime.models.settings import ModelSettings
from vime.models.sharing import Need, Wishes
from vime.models.stored import same_architecture

_MAX_NUM_SEQS = 1024  # vLLM's own default on devices of 70 GiB or more; a smaller one only makes the estimate safer


def division_of(config: Config, model: ModelSettings, world_size: int) -> Division:
    """How Megatron's flags divide the model over `world_size` ranks."""
    sizes, megatron = parallel_sizes(config.megatron), config.megatron
    layers = sizes.stages.layers(model.transformer["num_layers"])
    return Division(
        tensor=sizes.tensor,
        pipeline=sizes.pipeline,
        context=sizes.context,
        data=world_size // sizes.model,
        sequence_parallel=sizes.sequence_parallel,
        virtual=len(layers) // sizes.pipeline,
        group=sizes.stages.group,
        stage_layers=layers,
        expert=megatron.get("expert_model_parallel_size") or 1,
        expert_tensor=megatron.get("expert_tensor_parallel_size"),
    )


def training_of(config: Config, model: ModelSettings, dtype: str) -> Training:
    """What a step of this configuration looks like."""
    train, megatron = config.train, config.megatron
    length = config.rollout.rollout_max_context_len or model.max_position_embeddings
    context = parallel_sizes(megatron).context
    tokens = train.max_tokens_per_gpu if train.use_dynamic_batch_size else None
    full = megatron.get("recompute_granularity") == "full"
    teacher = _own_teacher(config, model)
    return Training(
        dtype=dtype,
        tokens=tokens if tokens is not None else -(-train.micro_batch_size * length // context),
        forward_tokens=train.log_probs_max_tokens_per_gpu,
        recompute=Recompute(
            granularity=megatron.get("recompute_granularity"),
            method=megatron.get("recompute_method") if full else None,
            num_layers=megatron.get("recompute_num_layers") or 1,
            modules=tuple(megatron.get("recompute_modules") or ("core_attn",)),
        ),
        log_probs_chunk_size=train.log_probs_chunk_size,
        use_distributed_optimizer=megatron.get("use_distributed_optimizer", True),
        grad_reduce_in_fp32=megatron.get("grad_reduce_in_fp32", True),
        optimizer_offload_fraction=(
            megatron.get("optimizer_offload_fraction", 1.0) if megatron.get("optimizer_cpu_offload") else 0.0
        ),
        num_host_weights=_num_host_weights(config, has_own_teacher=teacher is not None),
        teacher=teacher,
        has_critic=needs_critic(config.algo) and critic_ranks(config) is None,
        sync_buffer_bytes=config.sync.update_weight_buffer_size,
        saves_optimizer=config.checkpoint.save is not None and not config.checkpoint.no_save_optim,
        async_save=config.checkpoint.async_save,
        saves_reference=_saves_reference(config),
        ranks_per_node=config.cluster.actor_num_gpus_per_node,
    )


def critic_memory(config: Config, model: ModelSettings, dtype: str) -> list[DeviceMemory]:
    """The devices of a critic's own, one of each of its pipeline ranks; empty where it has none."""
    if (ranks := critic_ranks(config)) is None:
        return []
    own = replace(config, megatron=critic_layout(config.megatron, config.critic))
    training = replace(training_of(own, model, dtype), ranks_per_node=ranks.per_node)
    return estimate_critic(model, division_of(own, model, ranks.total), training)


def _own_teacher(config: Config, policy: ModelSettings) -> ModelSettings | None:
    """A teacher in the trainer whose weights cannot take the policy's place."""
    load = config.teacher.opd_teacher_load
    if not config.algo.use_opd or load is None or not (Path(load) / "config.json").is_file():
        return None
    hf = read_json_object(Path(load) / "config.json")
    teacher = family_of(hf).settings(hf)
    return None if same_architecture(teacher, policy) else teacher


def _num_host_weights(config: Config, *, has_own_teacher: bool) -> int:
    """Sets of weights beside the policy's: a reference, a teacher's, and those of the two newest versions sent."""
    has_teacher = config.algo.use_opd and config.teacher.opd_teacher_load is not None and not has_own_teacher
    return needs_reference(config.algo) + has_teacher + 2 * config.algo.keep_old_actor


def _saves_reference(config: Config) -> bool:
    """Whether checkpoints hold a reference: one that no setting names."""
    own = config.checkpoint.finetune and config.checkpoint.load is not None and config.checkpoint.ref_load is None
    return needs_reference(config.algo) and (own or config.algo.ref_update_interval is not None)


def wishes_of(config: Config) -> Wishes:
    """What the settings say of who leaves shared devices; --offload says it for both where nothing else does."""
    cluster = config.cluster
    both = cluster.offload
    return Wishes(
        offload_train=both if cluster.offload_train is None else cluster.offload_train,
        offload_rollout=both if cluster.offload_rollout is None else cluster.offload_rollout,
        utilization=config.vllm.get("gpu_memory_utilization"),
    )


def need_of(config: Config, model: ModelSettings, dtype: str, *, world_size: int, device_bytes: int) -> Need:
    """What trainer and engines want of a device that they share.

    Args: world_size: training ranks. device_bytes: of the smallest device.
    """
    division = division_of(config, model, world_size)
    training = training_of(config, model, dtype)
    fullest = max(estimate(model, division, training), key=lambda device: device.total)
    static = fullest.total - fullest.parts["working memory"]
    # Two buckets of CUDA IPC stay where engines have opened them.
    buckets = 2 * training.sync_buffer_bytes if config.sync.update_weight_transport in ("auto", "ipc") else 0
    cluster = config.cluster
    tensor = cluster.rollout_num_gpus_per_engine
    engine = Engine(device_bytes=device_bytes, utilization=0.0, tensor=tensor)
    sync = static + fullest.moments["weight sync"] + engine_sync_bytes(model, engine, training)
    cache = config.vllm.get("kv_cache_memory_bytes")
    if cache is None:
        samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
        engines = max(1, engine_devices(cluster) // tensor)
        in_flight = math.ceil(min(config.rollout.rollout_concurrency, samples) / engines)
        in_flight = min(in_flight, config.vllm.get("max_num_seqs") or _MAX_NUM_SEQS)
        length = config.rollout.rollout_max_context_len or model.max_position_embeddings
        cache = in_flight * length * cache_token_bytes(model, tensor, dtype)
    return Need(
        device=device_bytes,
        step=max(fullest.total, sync) + buckets,
        static=static + buckets,
        away=_away(division) + buckets,
        late=_moments(fullest, training),
        engine=round(engine_base_bytes(model, tensor, dtype)),
        cache=round(cache),
    )


def _away(division: Division) -> int:
    groups = (division.tensor, division.pipeline, division.context, division.dense_copies, division.expert)
    return CONTEXT_BYTES + NCCL_GROUP_BYTES * sum(size > 1 for size in groups)


def _moments(device: DeviceMemory, training: Training) -> int:
    """torch's AdamW makes them in its first step: all of its state but the float32 master weights."""
    state = device.parts["optimizer state"] + device.parts["critic's optimizer state"]
    return state if training.dtype == "float32" else round(state * 2 / 3)
