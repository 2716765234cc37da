"""How micro-batches are laid out for a model on this rank."""

from __future__ import annotations

import torch

from vime.models import ModelSettings
from vime.trainer.megatron import parallel
from vime.trainer.megatron.batches.packing import Layout
from vime.trainer.megatron.nn import layers, rope
from vime.trainer.megatron.settings import MegatronSettings


def layout_of(of: ModelSettings, settings: MegatronSettings, device_type: str) -> Layout:
    """What the models of a run need of their micro-batches. The process groups must exist."""
    inv_freq, rope_factor = rope.inverse_frequencies(of, torch.device(torch.cuda.current_device()))
    return Layout(
        inv_freq=inv_freq,
        rope_factor=rope_factor,
        cp_rank=parallel.cp_rank(),
        cp_size=parallel.cp_size(),
        multiple=parallel.tp_size() if settings.sizes.sequence_parallel else 1,
        group=settings.sizes.stages.micro_batch_multiple,
        dtype=settings.dtype,
        padded=not layers.uses_varlen_kernel(device_type, settings.dtype, of.transformer["kv_channels"]),
    )
