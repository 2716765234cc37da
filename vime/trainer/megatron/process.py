"""What a process needs before it can be a rank that trains."""

from __future__ import annotations

import torch

from vime.platform.base import Platform
from vime.trainer.megatron import cpu_shims, fixes


def prepare(platform: Platform, rank: int) -> None:
    """Let megatron-core work on this platform, and choose the rank's device. May be called again."""
    if platform.device_type == "cpu":
        cpu_shims.install()
    fixes.apply()
    if platform.device_type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
