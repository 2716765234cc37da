"""The range of each number among the settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vime.config import Config

# The least value of each number; one that may be unset is not checked when it is.
MINIMA: Mapping[str, float] = {
    "cluster.actor_num_nodes": 1,
    "cluster.actor_num_gpus_per_node": 1,
    "cluster.rollout_num_gpus": 1,
    "cluster.rollout_num_gpus_per_engine": 1,
    "cluster.num_cpus": 1,
    "checkpoint.save_interval": 1,
    "debug.profile_step_start": 0,
    "debug.memory_snapshot_num_steps": 1,
    "checkpoint.save_hf_interval": 1,
    "checkpoint.keep_last_checkpoints": 1,
    "checkpoint.ckpt_step": 0,
    "data.rollout_seed": 0,
    "data.rollout_max_prompt_len": 1,
    "rollout.num_rollout": 0,
    "rollout.num_epoch": 1,
    "rollout.start_rollout_id": 0,
    "rollout.rollout_batch_size": 0,
    "rollout.n_samples_per_prompt": 1,
    "rollout.over_sampling_batch_size": 1,
    "rollout.rollout_max_response_len": 1,
    "rollout.rollout_max_context_len": 2,
    "rollout.rollout_concurrency": 1,
    "rollout.custom_generate_max_retries": 0,
    "reward.rm_num_workers": 1,
    "reward.rm_memory_limit_bytes": 256 << 20,
    "reward.rm_url_max_retries": 0,
    "reward.rm_url_max_connections": 1,
    "eval.eval_interval": 1,
    "eval.n_samples_per_eval_prompt": 1,
    "eval.eval_temperature": 0,
    "eval.eval_min_new_tokens": 0,
    "eval.eval_max_response_len": 1,
    "eval.eval_max_prompt_len": 1,
    "eval.eval_max_context_len": 2,
    "algo.eps_clip": 0,
    "algo.eps_clip_high": 0,
    "algo.kl_loss_coef": 0,
    "algo.kl_coef": 0,
    "algo.ref_update_interval": 1,
    "algo.opd_kl_coef": 0,
    "teacher.opd_teacher_max_retries": 0,
    "teacher.opd_teacher_max_connections": 1,
    "algo.gamma": 0,
    "algo.loss_agg_length": 1,
    "algo.overlong_buffer_len": 1,
    "algo.overlong_penalty_factor": 0,
    "algo.opsm_delta": 0,
    "critic.critic_num_nodes": 1,
    "critic.critic_num_gpus_per_node": 1,
    "critic.critic_tensor_model_parallel_size": 1,
    "critic.critic_pipeline_model_parallel_size": 1,
    "critic.critic_context_parallel_size": 1,
    "critic.critic_lr": 0,
    "critic.critic_lr_warmup_iters": 0,
    "critic.critic_clip_grad": 0,
    "critic.critic_weight_decay": 0,
    "critic.num_critic_only_steps": 0,
    "algo.tis_clip_low": 0,
    "critic.lambd": 0,
    "critic.value_clip": 0,
    "train.global_batch_size": 1,
    "train.num_steps_per_rollout": 1,
    "train.micro_batch_size": 1,
    "train.max_tokens_per_gpu": 1,
    "train.log_probs_max_tokens_per_gpu": 1,
    "train.log_probs_chunk_size": 1,
    "train.lr_decay_iters": 1,
    "train.lr_warmup_iters": 0,
    "train.lr_warmup_init": 0,
    "train.seed": 0,
    "train.distributed_timeout_minutes": 1,
    "stream.max_staleness": 0,
    "stream.max_groups_in_flight": 1,
    "sync.update_weights_interval": 1,
    "sync.update_weight_buffer_size": 1,
    "sync.weight_probe_interval": 0,
    "train.stop_window": 1,
    "log.trace_max_mib": 1,
    "fault.rollout_health_check_first_wait": 0,
    "fault.rollout_router_memory_limit_bytes": 0,
    "fault.rollout_max_restarts": 0,
    "fault.rollout_restart_backoff_s": 0,
}
MAXIMA: Mapping[str, tuple[int, str]] = {
    "data.rollout_seed": (2**32 - 1, "numpy takes no larger seed"),
    "algo.gamma": (1, "a discount"),
    "train.seed": (2**32 - 1, "numpy takes no larger seed"),
    "train.distributed_timeout_minutes": (365 * 24 * 60, "a year"),
    "critic.lambd": (1, "GAE's weights add up to 1"),
}
LEAST_TEMPERATURE = 0.01
"""vLLM samples at this where a lower one above 0 is asked for, so log-probs would be of another distribution."""
WHY_LEAST_TEMPERATURE = f"vLLM samples at {LEAST_TEMPERATURE} at least; use that or more"
MAX_REWARD = 1e38
"""The difference of two of them fits into float32, which advantages are."""
ABOVE_ZERO = (
    "rollout.rollout_temperature",
    "rollout.custom_generate_timeout_s",
    "reward.rm_timeout_s",
    "reward.custom_rm_timeout_s",
    "reward.rm_url_timeout_s",
    "critic.value_loss_coef",
    "algo.tis_clip",
    "algo.rs_lower_bound",
    "algo.rs_upper_bound",
    "algo.rs_veto_threshold",
    "teacher.opd_teacher_timeout_s",
    "sync.weight_probe_tolerance",
    "sync.update_weight_timeout_s",
    "log.engine_start_timeout_s",
    "fault.rollout_health_check_interval",
    "fault.rollout_health_check_timeout",
    "fault.rollout_restart_window_s",
)


def value_of(config: Config, key: str) -> Any:
    """The value of a "section.field" key."""
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _flag(key: str) -> str:
    return "--" + key.split(".")[1].replace("_", "-")


def check_ranges(config: Config) -> Iterator[str]:
    """One sentence for each number outside of its range."""
    for key, least in MINIMA.items():
        value = value_of(config, key)
        if value is not None and value < least:
            yield f"{_flag(key)} is {value}, but must be at least {least}"
    for key, (most, why) in MAXIMA.items():
        if value_of(config, key) > most:
            yield f"{_flag(key)} is {value_of(config, key)}, but may be at most {most}: {why}"
    for key in ABOVE_ZERO:
        value = value_of(config, key)
        if value is not None and value <= 0:
            yield f"{_flag(key)} is {value}, but must be above 0"
    if 0 < config.rollout.rollout_temperature < LEAST_TEMPERATURE:
        yield f"--rollout-temperature is {config.rollout.rollout_temperature}, but {WHY_LEAST_TEMPERATURE}"
    yield from _engine_memory(config.vllm)
    if abs(config.reward.rm_failure_reward or 0) > MAX_REWARD:
        yield f"--rm-failure-reward is {config.reward.rm_failure_reward}, but may be at most {MAX_REWARD:g} in size"


def _engine_memory(vllm: Mapping[str, Any]) -> Iterator[str]:
    """vLLM would say the same, but when the run's processes are there."""
    share = vllm.get("gpu_memory_utilization")
    if share is not None and not 0 < share <= 1:
        yield f"--vllm-gpu-memory-utilization is {share}, but must be above 0 and at most 1: a share of a device"
    for name in ("kv_cache_memory_bytes", "max_num_seqs"):
        if vllm.get(name) is not None and vllm[name] < 1:
            yield f"--vllm-{name.replace('_', '-')} is {vllm[name]}, but must be at least 1"


def bounds(key: str) -> str:
    """What a "section.field" may be, in words; empty where every value is allowed."""
    parts = [f"at least {MINIMA[key]:g}"] if MINIMA.get(key) is not None else []
    parts += ["above 0"] if key in ABOVE_ZERO else []
    parts += [f"at most {MAXIMA[key][0]}"] if key in MAXIMA else []
    return ", ".join(parts)
