"""Another set of a model's weights, kept in host memory, that trades places with the model's own for a forward pass.

A reference, a teacher or an older policy of the same architecture so needs no place on the device, and no module: its
bytes go where the model's are, and the model's where its own were, block by block through a small buffer. Storages are
traded, not tensors: whatever views them (gradient buffers' parameters, a tied head, an optimizer's shards) sees the
other set meanwhile, and its own, bit for bit, afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from vime.models.memory import MIB
from vime.trainer.megatron.optimizers.offload import (
    ALIGNMENT,
    HostArena,
    bytes_of,
    filled_storages,
    parameters_and_buffers,
)

SWAP_BUFFER_BYTES = 64 * MIB
_REMEDY = "in which a second set of weights would be kept; give the host more memory"


class HostWeights:
    """One set. It begins as a copy of the model's own.

    Args: chunks: this rank's part of the model, whose weights are at their final places (behind DDP's wrapping).
    Raises: TrainingError if the host lacks memory.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._chunks = tuple(chunks)
        self._arena = HostArena(_REMEDY)
        self._is_in_place = False
        self._sizes = [storage.nbytes() for storage in self._storages()]
        on_cuda = any(storage.device.type == "cuda" for storage in self._storages())
        self._arena.reserve(sum(map(_aligned, self._sizes)), pinned=on_cuda)
        self.take()

    def take(self) -> None:
        """Become what the model's own weights are now."""
        assert not self._is_in_place, "the model has these weights already"
        for storage, host in self._places():
            host.copy_(bytes_of(storage), non_blocking=True)
        _wait(self._storages())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with this set inside, and has its own weights again behind it, also after an error."""
        assert not self._is_in_place, "the model has these weights already"
        self._exchange()
        self._is_in_place = True
        try:
            yield
        finally:
            self._exchange()
            self._is_in_place = False

    def kept(self, tensor: Tensor) -> Tensor:
        """What this set has where the model has `tensor`: a view of the host's memory, of the same shape and dtype.

        Raises: ValueError if it is none of the model's.
        """
        for storage, host in self._places():
            if storage._cdata == tensor.untyped_storage()._cdata:
                values = host.view(tensor.dtype)
                offset = values.storage_offset() + tensor.storage_offset()
                return values.as_strided(tensor.shape, tensor.stride(), offset)
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is no view of the model's weights")

    def close(self) -> None:
        """Give the host memory back."""
        self._arena.close()

    def _storages(self) -> list[torch.UntypedStorage]:
        return list(filled_storages(parameters_and_buffers(self._chunks)).values())

    def _places(self) -> Iterator[tuple[torch.UntypedStorage, Tensor]]:
        """The model's storages, and the host's bytes for each."""
        storages = self._storages()
        sizes = [storage.nbytes() for storage in storages]
        assert sizes == self._sizes, f"the model's weights were {self._sizes} bytes and are {sizes}; are they away?"
        begin = 0
        for storage in storages:
            yield storage, self._arena.slice(begin, storage.nbytes())
            begin += _aligned(storage.nbytes())

    @torch.no_grad()
    def _exchange(self) -> None:
        """One stream does all in order: a block's bytes are aside before they are written over, on either side."""
        aside: Tensor | None = None
        for storage, host in self._places():
            device = bytes_of(storage)
            if aside is None:
                aside = torch.empty(min(SWAP_BUFFER_BYTES, max(self._sizes)), dtype=torch.uint8, device=device.device)
            for begin in range(0, len(device), SWAP_BUFFER_BYTES):
                ours, theirs = (side[begin : begin + SWAP_BUFFER_BYTES] for side in (device, host))
                block = aside[: len(ours)]
                block.copy_(ours)
                ours.copy_(theirs, non_blocking=True)
                theirs.copy_(block, non_blocking=True)
        _wait(self._storages())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _wait(storages: Sequence[torch.UntypedStorage]) -> None:
    """For what the device was told to copy: the host may read it afterwards."""
    if any(storage.device.type == "cuda" for storage in storages):
        torch.cuda.current_stream().synchronize()
