"""How a bucket's tensors lie in bytes; shared by all transports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from vime.errors import WeightSyncError
from vime.wire import BucketMessage, TensorSpec, aligned, checksums


def places(outlines: Sequence[tuple[str, torch.Tensor]]) -> tuple[tuple[TensorSpec, ...], int]:
    """Where each tensor lies, one after the other; checksums are 0. Returns: specs, total bytes.

    Args: outlines: [(HF name, tensor)], of which only dtype and shape are looked at.
    """
    specs: list[TensorSpec] = []
    offset = 0
    for name, tensor in outlines:
        num_bytes = tensor.numel() * tensor.element_size()
        specs.append(TensorSpec(name, _dtype_name(tensor), tuple(tensor.shape), offset, num_bytes, 0))
        offset += aligned(num_bytes)
    return tuple(specs), max(offset, 1)  # an empty mapping cannot be made


def lay_out(
    outlines: Sequence[tuple[str, torch.Tensor]],
    contents: Iterable[torch.Tensor],
    place: Callable[[int], torch.Tensor],
) -> tuple[tuple[TensorSpec, ...], torch.Tensor]:
    """Copy a bucket's tensors to their place, one at a time, with their checksums computed on the device they are on.

    Args:
        outlines: [(HF name, tensor)], of which only dtype and shape are looked at.
        contents: the tensors, in that order; they may be made as they are asked for.
        place: bytes -> a tensor of so many uint8. Where the contents are on another device, they are laid out there
            first and cross over in one copy.
    Returns: specs, and the bucket's bytes in their place.
    """
    specs, num_bytes = places(outlines)
    target = place(num_bytes)
    data: torch.Tensor | None = None
    stream = iter(contents)
    for spec in specs:
        data = _put(data, target, next(stream, None), spec)  # no name keeps the tensor while the next is made
    if data is None:
        return specs, target
    sums = checksums(data, [spec.num_bytes for spec in specs])
    if data is not target:
        target.copy_(data)
    return tuple(replace(spec, checksum=one) for spec, one in zip(specs, sums, strict=True)), target


def _put(
    data: torch.Tensor | None, target: torch.Tensor, tensor: torch.Tensor | None, spec: TensorSpec
) -> torch.Tensor:
    """Copy a tensor to its place in `data`, which begins where the first tensor is. Returns: `data`."""
    if tensor is None:
        raise WeightSyncError(f"{spec.name} was announced, but the tensors end before it")
    if tuple(tensor.shape) != spec.shape or _dtype_name(tensor) != spec.dtype:
        raise WeightSyncError(
            f"{spec.name} was announced as {spec.dtype} {list(spec.shape)} and is {_dtype_name(tensor)} "
            f"{list(tensor.shape)}"
        )
    if data is None:
        same = tensor.device == target.device
        data = target if same else torch.empty(target.numel(), dtype=torch.uint8, device=tensor.device)
    end = spec.offset + spec.num_bytes
    data[spec.offset : end].view(tensor.dtype).view(spec.shape).copy_(tensor.detach())
    data[end : spec.offset + aligned(spec.num_bytes)].zero_()  # a bucket that was there before may show
    return data


def checked_length(source: torch.Tensor, bucket: BucketMessage) -> torch.Tensor:
    """The bucket's part of `source` ([bytes] uint8). Raises: WeightSyncError if it is longer."""
    if source.numel() < bucket.num_bytes:
        raise WeightSyncError(f"bucket {bucket.index} of {bucket.num_bytes} bytes has a place of {source.numel()}")
    return source[: bucket.num_bytes]


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
