"""How a bucket's tensors lie in bytes; shared by the transports that carry plain bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vime.errors import WeightSyncError
from vime.wire import BucketMessage, TensorSpec, aligned, checksum


def bucket_specs(tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[tuple[TensorSpec, ...], int]:
    """Place and checksum (on its own device) of each tensor, one after the other. Returns: specs, total bytes."""
    specs: list[TensorSpec] = []
    offset = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name, dtype, tuple(tensor.shape), offset, num_bytes, checksum(tensor)))
        offset += aligned(num_bytes)
    return tuple(specs), max(offset, 1)  # an empty mapping cannot be made


def copy_into(target: torch.Tensor, tensors: Sequence[tuple[str, torch.Tensor]], specs: Sequence[TensorSpec]) -> None:
    """Copy each tensor's bytes to its place in `target` ([bytes] uint8, on the CPU)."""
    for (_, tensor), spec in zip(tensors, specs, strict=True):
        place = target[spec.offset : spec.offset + spec.num_bytes].view(tensor.dtype).view(spec.shape)
        place.copy_(tensor.detach())


def view_tensors(source: torch.Tensor, bucket: BucketMessage) -> list[tuple[str, torch.Tensor]]:
    """[(name, view)] of a bucket's tensors in `source` ([bytes] uint8).

    Raises: WeightSyncError if a tensor leaves `source`, or its dtype and shape do not fit its bytes.
    """
    views = []
    for spec in bucket.tensors:
        dtype = getattr(torch, spec.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise WeightSyncError(f"{spec.name} has the unknown dtype {spec.dtype!r}")
        count = torch.Size(spec.shape).numel()
        end = spec.offset + spec.num_bytes
        if spec.offset < 0 or end > source.numel() or count * dtype.itemsize != spec.num_bytes:
            raise WeightSyncError(
                f"{spec.name}: {spec.num_bytes} bytes at {spec.offset} do not hold {spec.dtype} {list(spec.shape)} "
                f"in a bucket of {source.numel()} bytes"
            )
        views.append((spec.name, source[spec.offset : end].view(dtype).view(spec.shape)))
    return views
