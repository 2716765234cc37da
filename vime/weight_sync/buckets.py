"""Packing a stream of named tensors into buckets of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vime.wire import aligned

if TYPE_CHECKING:
    import torch


def make_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Cut a stream of (HF name, tensor) into runs of at most `max_bytes`, in the stream's order.

    A tensor larger than `max_bytes` gets a bucket of its own. Each bucket's list is emptied when the next is asked for,
    so that gathered tensors can be freed.

    Raises: ValueError if `max_bytes` is not positive.
    """
    if max_bytes <= 0:
        raise ValueError(f"a bucket of {max_bytes} bytes holds nothing; give a positive size")
    bucket: list[tuple[str, torch.Tensor]] = []
    filled = 0
    for name, tensor in tensors:
        num_bytes = aligned(tensor.numel() * tensor.element_size())
        if bucket and filled + num_bytes > max_bytes:
            yield bucket
            bucket.clear()
            filled = 0
        bucket.append((name, tensor))
        filled += num_bytes
    if bucket:
        yield bucket
