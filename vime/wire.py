"""What both ends of a weight sync share: the bucket layout, its checksum, and the messages' shapes.

A bucket is a run of named HF tensors, laid out one after the other in bytes. The trainer's end fills it and sends a
`BucketMessage`; the engine's end finds the bytes by `location`, checks every tensor's checksum on the device that
holds it, and loads it. Messages are plain JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vime.errors import WeightSyncError

if TYPE_CHECKING:
    import torch

ALIGNMENT_BYTES = 64  # each tensor starts on such a boundary, so that any dtype can be viewed in place
_GOLDEN = -7046029254386353131  # 2^64 / golden ratio as int64: spreads positions over all bits
_MODULUS = 1 << 64
_LOW_32, _LOW_35 = (1 << 32) - 1, (1 << 35) - 1
# Drawn at random: an arithmetic progression would miss some permutations.
_FACTORS = (
    *(423_991_193, 1_116_312_455, 729_496_295, 470_578_185, 392_987_195, 348_956_781, 963_861_021, 1_419_233_301),
    *(1_666_306_601, 1_358_145_403, 2_032_108_563, 453_005_741, 372_129_769, 592_381_595, 1_519_963_183, 1_053_746_429),
)
_CHUNK_ROWS = 1 << 20  # rows digested at a time: bounds the scratch memory at 128 MiB and three eighths of the data


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
    """The checksum of one tensor's bytes; see `checksums`.

    Args: tensor: any dtype and shape; one that is not contiguous, or does not fill its last row, is copied.
    Returns: an int in [0, 2^64).
    """
    import torch

    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if raw.numel() % ALIGNMENT_BYTES or raw.data_ptr() % 4 or raw.storage_offset() % 4:
        padded = raw.new_zeros(aligned(raw.numel()))
        padded[: raw.numel()] = raw
        return checksums(padded, [raw.numel()])[0]
    return checksums(raw, [raw.numel()])[0]


def checksums(data: torch.Tensor, sizes: Sequence[int]) -> list[int]:
    """A 64-bit checksum of each tensor of a bucket, computed on the bucket's own device in one pass.

    A row is 16 words of 32 bits. Its digest is the sum of word times factor, the factors odd, different and below 2^31:
    one changed word, or two that changed places, cannot leave it as it was. A tensor's checksum is the sum over its
    rows of mix(digest xor hash of the row's number), plus its size, modulo 2^64; mix loses nothing, so that one changed
    row always shows, and rows that moved do but for chance (2^-64). It guards against faults, not against an adversary.
    Only integers are added and multiplied: equal bytes give equal sums on every device.

    Args:
        data: [bytes] uint8: the tensors one after the other, each from an alignment boundary on, with zeros up to the
            next one; it starts at an address that 4 divides.
        sizes: of the tensors, in bytes.
    Returns: ints in [0, 2^64).
    """
    import torch

    device = data.device
    counts = [aligned(size) // ALIGNMENT_BYTES for size in sizes]
    total = sum(counts)
    if not total:
        return [size % _MODULUS for size in sizes]
    ends = torch.tensor(counts).cumsum(0)
    starts = ends - torch.tensor(counts)
    factors = torch.tensor(_FACTORS, device=device)
    first = torch.repeat_interleave(
        starts.to(device), torch.tensor(counts, device=device), output_size=total
    )  # of the row's tensor
    rows = data[: total * ALIGNMENT_BYTES].view(torch.int32).view(total, -1)
    sums = torch.zeros(total + 1, dtype=torch.int64, device=device)
    for begin in range(0, total, _CHUNK_ROWS):
        end = min(begin + _CHUNK_ROWS, total)
        mixed = (rows[begin:end] * factors).sum(1)  # int64 arithmetic wraps, as wanted
        numbers = torch.arange(begin + 1, end + 1, device=device) - first[begin:end]
        mixed ^= numbers * _GOLDEN
        mixed = (
            mixed ^ (mixed >> 32 & _LOW_32)
        ) * _GOLDEN  # the mask makes the shift a logical one, which loses no bit
        sums[begin + 1 : end + 1] = mixed ^ (mixed >> 29 & _LOW_35)
    sums = sums.cumsum(0)
    found: list[int] = (sums[ends.to(device)] - sums[starts.to(device)]).tolist()
    return [(size + one) % _MODULUS for size, one in zip(sizes, found, strict=True)]


def view_tensors(source: torch.Tensor, bucket: BucketMessage) -> list[tuple[str, torch.Tensor]]:
    """[(name, view)] of a bucket's tensors in `source` ([bytes] uint8).

    Raises: WeightSyncError if a tensor leaves `source`, does not follow the one before it, or its dtype and shape do
        not fit its bytes.
    """
    import torch

    views: list[tuple[str, torch.Tensor]] = []
    begin = 0
    for spec in bucket.tensors:
        dtype = getattr(torch, spec.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise WeightSyncError(f"{spec.name} has the unknown dtype {spec.dtype!r}")
        count = torch.Size(spec.shape).numel()
        end = spec.offset + spec.num_bytes
        if (
            spec.offset != begin
            or begin + aligned(spec.num_bytes) > source.numel()
            or count * dtype.itemsize != spec.num_bytes
        ):
            raise WeightSyncError(
                f"{spec.name}: {spec.num_bytes} bytes at {spec.offset} do not hold {spec.dtype} {list(spec.shape)} "
                f"in a bucket of {source.numel()} bytes"
            )
        views.append((spec.name, source[spec.offset : end].view(dtype).view(spec.shape)))
        begin += aligned(spec.num_bytes)
    return views


def wrong_tensors(source: torch.Tensor, bucket: BucketMessage) -> list[str]:
    """Names of the tensors in `source` ([bytes] uint8, on any device) whose checksum is not the announced one."""
    sums = checksums(source, [spec.num_bytes for spec in bucket.tensors])
    return [spec.name for spec, one in zip(bucket.tensors, sums, strict=True) if one != spec.checksum]


def make_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Cut a stream of (HF name, tensor) into runs of at most `max_bytes`, in the stream's order.

    A tensor larger than `max_bytes` gets a bucket of its own.

    Args: tensors: of which only dtype and shape are looked at; they may be on torch's "meta" device.

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
            bucket, filled = [], 0
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
