"""The ipc transport: engines read buckets where they lie on the device that they share with a training rank.

    training rank 0                          other training ranks            engine worker
    lay the bucket out in device memory ───> broadcast: each has it, too
    announce: device id -> handle (JSON) ──────────────────────────────────> open its own device's, copy, check, load
    lay the next one out in the other buffer meanwhile

Every training rank has two buffers, so that an engine of several devices finds each bucket on all of them. The engine
closes what it opened when the sync has ended: between syncs nobody but the trainer holds the memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from vime.errors import WeightSyncError
from vime.weight_sync.device_memory import CudaMemory, DeviceMemory, Shared, new_token
from vime.weight_sync.layout import checked_length, lay_out, places
from vime.wire import BucketMessage


@dataclass(frozen=True, slots=True)
class _Buffer:
    memory: Shared
    places: dict[str, dict[str, Any]]
    """Device id -> where an engine on it finds the buffer."""


class Writer:
    """The trainer's end; one on every training rank, and each call on all of them.

    Args:
        buffer_bytes: size of a buffer; a larger bucket gets a larger one.
        memory: of the rank's device; CUDA's when None.
    """

    def __init__(self, buffer_bytes: int, memory: DeviceMemory | None = None) -> None:
        self._buffer_bytes, self._given_memory = buffer_bytes, memory
        self._memory: DeviceMemory | None = None
        self._buffers: dict[int, _Buffer] = {}
        self._outgrown: list[Shared] = []

    def write(
        self, outlines: Sequence[tuple[str, Any]], contents: Iterable[Any], version: int, index: int
    ) -> BucketMessage:
        """Lay the tensors out in one of the two buffers, and have all ranks hold the same.

        Args: contents: the tensors on rank 0; elsewhere what comes is passed over.
        """
        if index == 0:
            self._free_outgrown()
        specs, num_bytes = places(outlines)
        buffer = self._buffer(index % 2, num_bytes)
        data = buffer.memory.data[:num_bytes]
        if _rank() == 0:
            specs, _ = lay_out(outlines, contents, lambda _: data)
        else:
            deque(contents, maxlen=0)  # hands rank 0 its parts
        if _num_ranks() > 1:
            dist.broadcast(data, src=0)
        self._device.synchronize()  # an engine knows nothing of our streams
        return BucketMessage(version, index, specs, num_bytes, {"ipc": buffer.places})

    def call_off(self) -> None:
        """Nobody waits for a bucket here."""

    def close(self) -> None:
        """Free the buffers."""
        self._outgrown += [buffer.memory for buffer in self._buffers.values()]
        self._buffers.clear()
        self._free_outgrown()

    @property
    def _device(self) -> DeviceMemory:
        if self._memory is None:  # only now: the rank has chosen its device
            self._memory = self._given_memory or CudaMemory()
        return self._memory

    def _buffer(self, turn: int, num_bytes: int) -> _Buffer:
        old = self._buffers.get(turn)
        if old is not None and old.memory.data.numel() >= num_bytes:
            return old
        if old is not None:
            self._outgrown.append(self._buffers.pop(turn).memory)  # an engine may have it open until the sync ends
        size = max(num_bytes, self._buffer_bytes)
        memory = self._device.allocate(size)
        mine = {self._device.device_id(): {"handle": memory.handle, "num_bytes": size, "token": new_token()}}
        everybodys: list[dict[str, Any]] = [mine]
        if _num_ranks() > 1:
            everybodys = [{} for _ in range(_num_ranks())]
            dist.all_gather_object(everybodys, mine)
        together = {device: place for one in everybodys for device, place in one.items()}
        self._buffers[turn] = _Buffer(memory, together)
        return self._buffers[turn]

    def _free_outgrown(self) -> None:
        while self._outgrown:
            self._outgrown.pop().release()


class Reader:
    """The engine's end, in each of its worker processes.

    Args: memory: of the worker's device; CUDA's when None.
    """

    def __init__(self, memory: DeviceMemory | None = None) -> None:
        self._memory = memory
        self._opened: dict[str, Shared] = {}

    def read(self, bucket: BucketMessage, device: torch.device) -> torch.Tensor:
        """The bucket's bytes, copied from the trainer's buffer on the same device.

        Raises: WeightSyncError if no training rank is on this worker's device, or the buffer is gone.
        """
        self._memory = self._memory or CudaMemory()
        by_device = bucket.location.get("ipc")
        if not isinstance(by_device, dict):
            raise WeightSyncError(f"{dict(bucket.location)!r} is not a place of vime's ipc transport")
        mine = self._memory.device_id()
        if mine not in by_device:
            raise WeightSyncError(
                f"this engine worker is on device {mine}, where no training rank is (they are on "
                f"{', '.join(sorted(by_device))}); ipc is for --colocate, use --update-weight-transport nccl or shm"
            )
        try:
            handle, num_bytes, token = (by_device[mine][key] for key in ("handle", "num_bytes", "token"))
            if token not in self._opened:
                self._opened[token] = self._memory.open(handle, num_bytes)
        except (KeyError, TypeError, ValueError) as error:
            raise WeightSyncError(f"{by_device[mine]!r} is not a place of vime's ipc transport: {error!r}") from error
        return checked_length(self._opened[token].data, bucket).to(device, copy=True)

    def end_sync(self) -> None:
        """Close what was opened, so that the trainer may free it."""
        while self._opened:
            self._opened.popitem()[1].release()

    def close(self) -> None:
        """As after a sync."""
        self.end_sync()


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
