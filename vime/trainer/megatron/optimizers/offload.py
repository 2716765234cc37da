"""Frees the device for the engines (colocate) by moving storages, not tensors, to pinned host memory.

Megatron's parameters, gradients and optimizer shards are views of flat buffers. Emptying a storage frees its memory and
leaves every view in place, so nothing has to be wired again, and what several views share moves once.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vime.errors import TrainingError
from vime.models.memory import GIB
from vime.protocols import TRAINER_PARTS, TrainerPart
from vime.trainer.megatron.nn.model import Policy

ALIGNMENT = 512
"""Of what is laid one behind the other in host memory."""
_USE = (
    "to which the trainer would leave the device; give the host more memory, or let it stay by --no-offload-train and "
    "a lower --vllm-gpu-memory-utilization"
)


class HostArena:
    """One block of host memory, pinned where a CUDA device is to read it; kept from turn to turn, for pinning is slow.

    torch's own pinned memory is not used: it rounds each block up to a power of two.

    Args: use: how an error goes on that says that the host lacks memory.
    """

    def __init__(self, use: str = _USE) -> None:
        self._use = use
        self._block = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False

    def reserve(self, num_bytes: int, *, pinned: bool) -> None:
        """Make room; what was there is lost if it is too small. Raises: TrainingError if the host lacks memory."""
        if self._block.numel() >= num_bytes and (self._is_pinned or not pinned):
            return
        self.close()
        # Whole pages of its own: CUDA refuses to pin a page twice, and small blocks would share one.
        num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = torch.empty(num_bytes + mmap.PAGESIZE, dtype=torch.uint8)
        begin = -whole.data_ptr() % mmap.PAGESIZE
        self._block = whole[begin : begin + num_bytes]
        if pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = int(runtime.cudaHostRegister(self._block.data_ptr(), num_bytes, 0))
            if code:
                raise TrainingError(
                    f"{num_bytes / GIB:.1f} GiB of host memory could not be pinned (CUDA error {code}), {self._use}"
                )
            self._is_pinned = True

    def slice(self, begin: int, num_bytes: int) -> Tensor:
        """[num_bytes] uint8."""
        return self._block[begin : begin + num_bytes]

    def close(self) -> None:
        """Give the memory back."""
        if self._is_pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self._block.data_ptr())
        self._block, self._is_pinned = torch.empty(0, dtype=torch.uint8), False


@dataclass(slots=True)
class Away:
    """One part of what fills the device, and where its bytes are while it is away."""

    arena: HostArena = field(default_factory=HostArena)
    kept: list[tuple[torch.UntypedStorage, int, int]] = field(default_factory=list)
    """Storage, place in the arena, bytes."""
    dropped: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)
    is_away: bool = False


class Offloader:
    """Empties the storages behind named parts, and fills them again.

    `offload` and `onload` wait for the device, so that memory is free, or contents are there, when they return.
    """

    def __init__(self) -> None:
        self._parts: dict[str, Away] = {}

    def is_away(self, part: str) -> bool:
        """Whether the part was offloaded and did not come back."""
        return part in self._parts and self._parts[part].is_away

    def offload(self, part: str, keep: Iterable[Tensor], drop: Iterable[Tensor] = ()) -> int:
        """Move the storages of `keep` to the host and free those of `drop`, whose contents are not needed.

        A storage behind both is kept. One that another part has emptied already is left alone.

        Returns: bytes freed on the device.
        """
        away = self._parts.setdefault(part, Away())
        if away.is_away:
            raise RuntimeError(f"{part} is offloaded already")
        storages = filled_storages(keep)
        place = 0
        kept = []
        for storage in storages.values():
            kept.append((storage, place, storage.nbytes()))
            place += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        dropped = [(s, s.nbytes()) for key, s in filled_storages(drop).items() if key not in storages]
        away.arena.reserve(place, pinned=any(s.device.type == "cuda" for s, _, _ in kept))
        _copy(kept, away.arena, to_host=True)
        away.kept, away.dropped, away.is_away = kept, dropped, True
        for storage in (*(s for s, _, _ in kept), *(s for s, _ in dropped)):
            storage.resize_(0)
        return sum(n for _, _, n in kept) + sum(n for _, n in dropped)

    def onload(self, part: str) -> int:
        """Bring a part back; dropped storages come back as zeros. Does nothing when it is not away.

        Returns: bytes taken on the device.
        """
        if not self.is_away(part):
            return 0
        away = self._parts[part]
        for storage, num_bytes in (*((s, n) for s, _, n in away.kept), *away.dropped):
            storage.resize_(num_bytes)
        _copy(away.kept, away.arena, to_host=False)
        for storage, _ in away.dropped:
            bytes_of(storage).zero_()
        taken = sum(n for _, _, n in away.kept) + sum(n for _, n in away.dropped)
        away.kept, away.dropped, away.is_away = [], [], False
        return taken

    def close(self) -> None:
        """Give the host memory back; what is away stays empty."""
        for away in self._parts.values():
            away.arena.close()
        self._parts.clear()


def filled_storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """The storages behind tensors that hold something, each once, by an identity that emptying does not change.

    In the tensors' order.
    """
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage for storage in storages if storage.nbytes()}


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """[bytes] uint8, a view."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy(kept: Sequence[tuple[torch.UntypedStorage, int, int]], arena: HostArena, *, to_host: bool) -> None:
    """All copies at once on a stream of their own, between what the device did before and what it does next."""
    on_cuda = any(storage.device.type == "cuda" for storage, _, _ in kept)
    stream = torch.cuda.Stream() if on_cuda else None  # type: ignore[no-untyped-call]
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for storage, begin, num_bytes in kept:
            device, host = bytes_of(storage), arena.slice(begin, num_bytes)
            (host if to_host else device).copy_(device if to_host else host, non_blocking=stream is not None)
    if stream is not None:
        stream.synchronize()


class DeviceParts:
    """What a trainer has on its device, in the two parts that leave and come back: see `vime.protocols.TrainerPart`."""

    def __init__(self, policy: Policy, device_type: str, *, critic: Policy | None = None) -> None:
        self._policy, self._device_type = policy, device_type
        self._trained = [policy] if critic is None else [policy, critic]
        self._offloader = Offloader()

    def offload(self, parts: Iterable[TrainerPart] = TRAINER_PARTS) -> None:
        """Free the device of these parts, and of what torch has cached for later."""
        away, parts = self._offloader.is_away, set(parts)
        if "state" in parts and not away("state"):
            weights = filled_storages(self._weights())
            for trained in self._trained:
                trained.optimizer.zero_grad()  # copies of gradients that the optimizer still holds
            state = [t for t in self._state() if t.untyped_storage()._cdata not in weights]
            drop = [buffer for trained in self._trained for buffer in trained.grad_buffers()]
            self._offloader.offload("state", state, drop=drop)
        if "weights" in parts and not away("weights"):
            self._offloader.offload("weights", self._weights())
        torch.cuda.empty_cache()

    def onload(self, parts: Iterable[TrainerPart] = TRAINER_PARTS) -> None:
        """Bring these parts back. Raises: TrainingError if the device has no room for them."""
        try:
            for part in parts:
                self._offloader.onload(part)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info()
            raise TrainingError(
                f"the trainer cannot come back to its device, which has {free / GIB:.1f} of {total / GIB:.1f} GiB "
                "free; lower --vllm-gpu-memory-utilization, or let the engines sleep by --offload-rollout"
            ) from error

    def close(self) -> None:
        """Give the host memory back."""
        self._offloader.close()

    def _weights(self) -> list[Tensor]:
        return self._on_device(parameters_and_buffers(self._policy.chunks))

    def _state(self) -> list[Tensor]:
        """What only a training step needs: optimizers, and all of the critic, whose weights no engine gets."""
        state: list[Tensor] = []
        for trained in self._trained:
            state += [p for group in trained.optimizer.param_groups for p in group["params"]]
            state += trained.optimizer_tensors()
            if trained is not self._policy:
                state += parameters_and_buffers(trained.chunks)
        return self._on_device(state)

    def _on_device(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [tensor for tensor in tensors if tensor.device.type == self._device_type]


def parameters_and_buffers(modules: Sequence[torch.nn.Module]) -> list[Tensor]:
    """All tensors of modules, in an order that stays."""
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
