"""What a process needs before it can be a rank with a model: to train it, or to score with it."""

from __future__ import annotations

from typing import Any

import torch

from vime.config import Config
from vime.platform.base import Platform
from vime.trainer.megatron import parallel
from vime.trainer.megatron.aligned import align
from vime.trainer.megatron.patches import cpu_shims, fixes
from vime.trainer.megatron.settings import MegatronSettings


def prepare(config: Config, platform: Platform, rank: int) -> None:
    """Let megatron-core work on this platform, and choose the rank's device. May be called again."""
    if platform.device_type == "cpu":
        cpu_shims.install()
    fixes.apply()
    if platform.device_type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    align(platform.device_type, aligned=config.train.aligned)


def join(
    config: Config, platform: Platform, own: MegatronSettings, *, rank: int, world_size: int, init_method: Any
) -> None:
    """Join the ranks of one model. Args: own: its settings; the others as `parallel.start` takes them."""
    parallel.start(
        backend=platform.collective_backend,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout_minutes=config.train.distributed_timeout_minutes,
        seed=config.train.seed,
        sizes=own.sizes,
        virtual_stages=own.transformer.virtual_pipeline_model_parallel_size,
    )
