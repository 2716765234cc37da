"""Device memory that another process on the same device can open: CUDA's inter-process handles.

Straight from the driver: torch's allocator with expandable segments (which the trainer runs with) hands out memory that
has no such handle, and its own sharing goes through pickle. A handle is 64 bytes, written as hex digits.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vime.errors import WeightSyncError

HANDLE_BYTES = 64
_GRANULARITY = 2 << 20  # smaller allocations share a block, and a handle is of the whole block
_LAZY_PEER_ACCESS = 1


@dataclass(frozen=True, slots=True)
class Shared:
    """An allocation of this process's, or one of another's that was opened."""

    data: torch.Tensor
    """[bytes] uint8; not to be used after `release`."""
    handle: str
    release: Callable[[], None]
    """Free it, or close it."""


class DeviceMemory(Protocol):
    """What the ipc transport needs of a device."""

    def device_id(self) -> str:
        """The same in all processes that use this process's current device, and in no other."""

    def allocate(self, num_bytes: int) -> Shared:
        """Memory with a handle. Raises: WeightSyncError when there is none left."""

    def open(self, handle: str, num_bytes: int) -> Shared:
        """Another process's allocation. Raises: WeightSyncError if it is gone."""

    def synchronize(self) -> None:
        """Wait for what was queued on the device."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class _Bytes:
    """What torch takes device memory from: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaMemory:
    """Satisfies `DeviceMemory` for torch's current CUDA device, of the process that makes it."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        try:
            self._driver: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise WeightSyncError(f"the CUDA driver's library cannot be loaded: {error}") from error
        # Handles are passed by value, addresses as 64 bits: without prototypes both would be cut.
        address, handle = ctypes.c_uint64, _Handle
        self._driver.cuMemAlloc_v2.argtypes = [ctypes.POINTER(address), ctypes.c_size_t]
        self._driver.cuMemFree_v2.argtypes = [address]
        self._driver.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(handle), address]
        self._driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(address), handle, ctypes.c_uint]
        self._driver.cuIpcCloseMemHandle.argtypes = [address]
        self._driver.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]

    def device_id(self) -> str:
        """The device's UUID, whatever its number is in this process."""
        return str(torch.cuda.get_device_properties(self._device).uuid)

    def allocate(self, num_bytes: int) -> Shared:
        """Of at least `num_bytes`. Raises: WeightSyncError if the device is full, or cannot share memory."""
        size = -(-num_bytes // _GRANULARITY) * _GRANULARITY
        address, handle = ctypes.c_uint64(), _Handle()
        torch.cuda.empty_cache()  # what torch keeps for itself, the driver cannot give
        self._call(
            "cuMemAlloc_v2",
            ctypes.byref(address),
            size,
            doing=f"take {size} bytes of {self._device} for weight buckets",
            remedy="lower --update-weight-buffer-size",
        )
        try:
            self._call(
                "cuIpcGetMemHandle",
                ctypes.byref(handle),
                address,
                doing="share device memory with another process",
                remedy="use --update-weight-transport shm",
            )
        except WeightSyncError:
            self._driver.cuMemFree_v2(address)
            raise

        def release() -> None:
            self._call("cuMemFree_v2", address, doing="free a weight bucket")

        return Shared(self._tensor(address.value, size), bytes(handle.reserved).hex(), release)

    def open(self, handle: str, num_bytes: int) -> Shared:
        """See `DeviceMemory`."""
        raw = bytes.fromhex(handle)
        if len(raw) != HANDLE_BYTES:
            raise WeightSyncError(f"a handle of {len(raw)} bytes is none of CUDA's, which have {HANDLE_BYTES}")
        address, opened = ctypes.c_uint64(), _Handle.from_buffer_copy(raw)
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            opened,
            _LAZY_PEER_ACCESS,
            doing="open the trainer's weight bucket",
            remedy="use --update-weight-transport shm if trainer and engine are in containers of their own",
        )

        def release() -> None:
            self._call("cuIpcCloseMemHandle", address, doing="close the trainer's weight bucket")

        return Shared(self._tensor(address.value, num_bytes), handle, release)

    def synchronize(self) -> None:
        """See `DeviceMemory`."""
        torch.cuda.synchronize(self._device)

    def _tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        return torch.as_tensor(_Bytes(address, num_bytes), device=self._device)

    def _call(self, function: str, *arguments: Any, doing: str, remedy: str = "") -> None:
        self.synchronize()  # also makes torch's context the calling thread's, which the driver works in
        if code := getattr(self._driver, function)(*arguments):
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            reason = (text.value or b"unknown").decode(errors="replace")
            raise WeightSyncError(f"cannot {doing}: {reason} ({function}, {code}){'; ' if remedy else ''}{remedy}")


def new_token() -> str:
    """Names an allocation: a driver may give a later one at the same address an equal handle."""
    return secrets.token_hex(8)
