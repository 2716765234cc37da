"""A device of files, for the ipc transport without one: memory that several processes open by a handle of 64 bytes."""

from __future__ import annotations

import mmap
import secrets
from pathlib import Path

import torch

from vime.errors import WeightSyncError
from vime.weight_sync.device_memory import HANDLE_BYTES, Shared


class HostMemory:
    """Satisfies `DeviceMemory`. Args: folder: the device; processes that name it share it. device: its id."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._device = folder, device
        self.opened: list[str] = []
        self.freed: list[str] = []

    def device_id(self) -> str:
        return self._device

    def allocate(self, num_bytes: int) -> Shared:
        name = secrets.token_hex(HANDLE_BYTES // 2)
        path = self._folder / name
        path.write_bytes(bytes(num_bytes))

        def release() -> None:
            self.freed.append(name)
            path.unlink()

        return Shared(self._map(path), name.encode("ascii").hex(), release)

    def open(self, handle: str, num_bytes: int) -> Shared:
        path = self._folder / bytes.fromhex(handle).decode("ascii")
        if not path.is_file():
            raise WeightSyncError("it is gone")
        self.opened.append(handle)
        return Shared(self._map(path), handle, lambda: self.opened.remove(handle))

    def synchronize(self) -> None: ...

    def _map(self, path: Path) -> torch.Tensor:
        with path.open("r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
