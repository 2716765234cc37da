"""What both ends of a weight sync share: the bucket layout, its checksum, and the messages' shapes.

A bucket is a run of named HF tensors, laid out one after the other in bytes. The trainer's end fills it and sends a
`BucketMessage`; the engine's end finds the bytes by `location`, checks every tensor's checksum on the device that
holds it, and loads it. Messages are plain JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ALIGNMENT_BYTES = 64  # each tensor starts on such a boundary, so that any dtype can be viewed in place
_GOLDEN = -7046029254386353131  # 2^64 / golden ratio as int64: spreads positions over all bits
_CHUNK_WORDS = 1 << 22  # words hashed at a time: bounds the checksum's scratch memory at 64 MiB


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a bucket: HF name, torch dtype name ("bfloat16"), shape, place in bytes, checksum."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class BucketMessage:
    """One bucket, as announced to an engine."""

    version: int
    index: int
    tensors: tuple[TensorSpec, ...]
    num_bytes: int
    location: Mapping[str, Any]
    """Where the bytes are; the transport's own words, such as {"shm": "vime-…"} or {"path": "…"}."""

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; `from_json` is its inverse."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> BucketMessage:
        """Rebuild a message from `to_json`'s dict. Raises: KeyError, TypeError on a malformed message."""
        tensors = tuple(TensorSpec(**{**t, "shape": tuple(t["shape"])}) for t in data["tensors"])
        return BucketMessage(data["version"], data["index"], tensors, data["num_bytes"], dict(data["location"]))


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to the next tensor boundary."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def checksum(tensor: torch.Tensor) -> int:
    """A 64-bit checksum of a tensor's bytes, computed on the tensor's own device.

    Sum over 64-bit words of mix(word xor position hash), modulo 2^64: any changed, moved or missing word changes it.
    It guards against faults, not against an adversary. Equal bytes give equal sums on every device.

    Args: tensor: any dtype and shape; a non-contiguous one is copied.
    Returns: an int in [0, 2^64).
    """
    import torch

    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    pad = -raw.numel() % 8
    if pad:
        raw = torch.cat([raw, raw.new_zeros(pad)])
    words = raw.view(torch.int64) if raw.data_ptr() % 8 == 0 else raw.clone().view(torch.int64)
    total = tensor.numel() * tensor.element_size()
    for start in range(0, words.numel(), _CHUNK_WORDS):
        part = words[start : start + _CHUNK_WORDS]
        position = torch.arange(start + 1, start + 1 + part.numel(), device=part.device, dtype=torch.int64)
        mixed = part ^ (position * _GOLDEN)
        mixed = (mixed ^ (mixed >> 32)) * _GOLDEN  # int64 arithmetic wraps, as wanted
        mixed = mixed ^ (mixed >> 29)
        total += int(mixed.sum())
    return total % (1 << 64)


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


def duplicate_names(names: Iterable[str]) -> list[str]:
    """The names that occur more than once, sorted."""
    seen: set[str] = set()
    twice: set[str] = set()
    for name in names:
        (twice if name in seen else seen).add(name)
    return sorted(twice)
