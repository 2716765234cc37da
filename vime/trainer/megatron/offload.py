"""Frees the device for the engines (colocate) by moving storages, not tensors, to host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from vime.trainer.megatron.model import Policy


class Offloader:
    """Empties the storages behind a set of tensors and fills them again.

    Megatron's parameters, gradients and optimizer shards are views of a few flat buffers. Emptying a buffer's storage
    frees the memory and leaves every view in place, so nothing has to be wired again.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []

    def offload(self, keep: Iterable[Tensor], drop: Iterable[Tensor] = ()) -> None:
        """Move the storages of `keep` to pinned host memory and free those of `drop`, whose contents are not needed.

        A storage behind both is kept.
        """
        if self._kept or self._dropped:
            raise RuntimeError("offloaded already")
        storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in keep) if s.nbytes()}
        for storage in storages.values():
            device_bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            host.copy_(device_bytes)
            self._kept.append((storage, host))
        for tensor in drop:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in storages:
                self._dropped.append((storage, storage.nbytes()))
                storages[storage.data_ptr()] = storage
        for storage in storages.values():
            storage.resize_(0)

    def onload(self) -> None:
        """Bring everything back; dropped storages come back as zeros. Does nothing when nothing is offloaded."""
        for storage, host in self._kept:
            storage.resize_(host.numel())
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(host)
        for storage, num_bytes in self._dropped:
            storage.resize_(num_bytes)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
        self._kept.clear()
        self._dropped.clear()


def device_tensors(
    policy: Policy, reference: Sequence[torch.nn.Module], device_type: str
) -> tuple[list[Tensor], list[Tensor]]:
    """What fills the device between steps: tensors whose contents count, and gradients, whose do not."""
    modules: list[torch.nn.Module] = [*policy.chunks, *reference]
    keep: list[Tensor] = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    keep += [p for group in policy.optimizer.param_groups for p in group["params"]]
    keep += policy.optimizer_tensors()
    return [t for t in keep if t.device.type == device_type], policy.grad_buffers()
