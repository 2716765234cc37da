"""What every engine is started with, whoever starts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vime.config import Config
from vime.config.dtype import run_dtype
from vime.config.modes import engines_return_experts, engines_return_support
from vime.engine.vllm.answers import RoutingShape
from vime.engine.vllm.supports import most_entries
from vime.models import family_of
from vime.orchestration import sizes
from vime.platform.base import Platform

_MAX_LOGPROBS = 20
"""vLLM's own default."""
FIXED_BATCHES = {
    "scheduler_cls": "vime.engine.vllm.fixed_batches.FixedBatchScheduler",
    "enable_prefix_caching": False,
    "async_scheduling": False,
}
"""AsyncEngineArgs fields of an engine whose samples depend on nothing but their batch (--deterministic)."""


def engine_arguments(
    config: Config, platform: Platform, hf_config: Mapping[str, Any], sharing: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """AsyncEngineArgs fields of every engine: what the platform wants, what follows from the settings, --vllm-*.

    Args: sharing: what follows from sharing devices with the trainer.
    """
    num_devices = config.cluster.rollout_num_gpus_per_engine
    limit = support_limit(config, hf_config)
    given = config.vllm.get("max_logprobs")
    enough = {} if limit is None or given == -1 else {"max_logprobs": max(limit, given or _MAX_LOGPROBS)}
    return {
        **platform.engine_arguments(sizes.max_model_len(config, hf_config), num_devices),
        "dtype": run_dtype(config.megatron, hf_config),
        "tensor_parallel_size": num_devices,
        "seed": config.data.rollout_seed,
        **(sharing or {}),
        **(platform.aligned_engine()[0] if config.train.aligned else {}),
        **(FIXED_BATCHES if config.rollout.deterministic else {}),
        **config.vllm,
        **enough,
    }


def support_limit(config: Config, hf_config: Mapping[str, Any]) -> int | None:
    """The most log-probs of a position that engines are asked for, so that they say what they could have sampled.

    None where they sample from the whole vocabulary, or nobody trains on it.
    """
    if not engines_return_support(config):
        return None
    return most_entries(config.rollout.rollout_top_k, family_of(hf_config).settings(hf_config).vocab_size)


def routing_shape(config: Config, hf_config: Mapping[str, Any]) -> RoutingShape | None:
    """What engines say of the experts they used looks like; None where they are not to say it."""
    if not engines_return_experts(config):
        return None
    return RoutingShape.of(family_of(hf_config).settings(hf_config))


def engine_environment(
    platform: Platform, device_numbers: Sequence[str], *, routed_experts: bool = False, aligned: bool = False
) -> dict[str, str]:
    """Variables of the process of an engine on these devices.

    Args:
        device_numbers: as the platform's visible-devices variable takes them; empty strings where it has none.
        routed_experts: the engine is to return them.
        aligned: it is to compute as the trainer does with --aligned.
    """
    environment = platform.engine_environment(len(device_numbers), routed_experts=routed_experts)
    if aligned:
        environment |= platform.aligned_engine()[1]
    if platform.visible_devices_variable is not None:
        environment[platform.visible_devices_variable] = ",".join(device_numbers)
    return environment
