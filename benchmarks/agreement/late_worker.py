"""vime's worker extension, whose engine loads what the weight sync before brought; the first one its own."""

from __future__ import annotations

import torch

from vime.engine.vllm.worker_ext import SyncEngine, WorkerExtension
from vime.wire import BucketMessage

__all__ = ["WorkerExtension"]

_read = SyncEngine._read
_kept: dict[str, torch.Tensor] = {}


def _read_late(engine: SyncEngine, message: BucketMessage) -> list[tuple[str, torch.Tensor]]:
    tensors = _read(engine, message)
    late = [(name, _kept.get(name, tensor)) for name, tensor in tensors]
    _kept.update({name: tensor.clone() for name, tensor in tensors})
    return late


SyncEngine._read = _read_late  # type: ignore[method-assign]
