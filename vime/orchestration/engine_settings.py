"""What every engine is started with, whoever starts it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.config import Config
from vime.config.dtype import run_dtype
from vime.orchestration import sizes
from vime.platform.base import Platform


def engine_arguments(config: Config, platform: Platform, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """AsyncEngineArgs fields of every engine: what the platform wants, what follows from the settings, --vllm-*."""
    return {
        **platform.engine_arguments(sizes.max_model_len(config, hf_config)),
        "dtype": run_dtype(config.megatron, hf_config),
        "tensor_parallel_size": config.cluster.rollout_num_gpus_per_engine,
        "seed": config.data.rollout_seed,
        **config.vllm,
    }
