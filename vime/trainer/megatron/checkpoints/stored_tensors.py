"""Tensors of a checkpoint in torch's distributed format, read without any model: one at a time, or ranges of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from vime.errors import ConfigError
from vime.trainer.megatron.checkpoints import plain_pickles

PIECE = 1 << 26
"""Numbers of a range that are read at a time, 256 MiB of float32."""


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One stored piece of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Any
    """File, offset and length."""


class StoredTensors:
    """Args: folder: with `.metadata`. Raises: ConfigError if there is none, or it cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            metadata = plain_pickles.read_metadata(folder)
        except Exception as error:  # a damaged pickle calls anything with anything
            words = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"{folder} is not a training checkpoint, or is damaged: {type(error).__name__}: {words}"
            ) from error
        entries = metadata.state_dict_metadata.items()
        self._tensors = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
        self._chunks: dict[str, list[_Chunk]] = {key: [] for key in self._tensors}
        sizes = {
            key: {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
            for key, entry in self._tensors.items()
        }
        for index, place in (metadata.storage_data or {}).items():
            if index.fqn in self._tensors and index.offset is not None:
                offsets = tuple(index.offset)
                self._chunks[index.fqn].append(_Chunk(offsets, sizes[index.fqn][offsets], place))
        self._begins: dict[tuple[str, int], int] = {}

    def keys(self) -> set[str]:
        """Of all tensors."""
        return set(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self._tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        """As it is stored."""
        return self._tensors[key].properties.dtype

    def read(self, key: str, lead: tuple[int, ...] = ()) -> Tensor:
        """The tensor, or its part at these indices of its first dimensions.

        Raises: ConfigError if pieces of it are missing or cannot be read.
        """
        out = torch.empty(self.shape(key)[len(lead) :], dtype=self.dtype(key))
        filled = 0
        for chunk in self._chunks[key]:
            if all(o <= i < o + s for i, o, s in zip(lead, chunk.offsets, chunk.sizes, strict=False)):
                piece = self._load(key, chunk)[tuple(i - o for i, o in zip(lead, chunk.offsets, strict=False))]
                offsets, sizes = chunk.offsets[len(lead) :], chunk.sizes[len(lead) :]
                out[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] = piece
                filled += piece.numel()
        if filled != out.numel():
            raise ConfigError(
                f"{self._folder} is damaged: it has {filled} of the {out.numel()} numbers of {key} {lead}"
            )
        return out

    def read_range(self, key: str, box: Box, begin: int, out: Tensor, *, piece: int = PIECE) -> int:
        """Fill `out` with numbers of a box of the tensor, taken as flat; what is not stored stays as it was.

        Args:
            begin: where in the flat box `out` begins.
            out: [any], on any device.
            piece: numbers to hold at a time.
        Returns: how many numbers were filled.
        Raises: ValueError, OSError or RuntimeError if a stored piece cannot be read.
        """
        filled = at = 0
        for run in boxes(box.sizes, begin, begin + out.numel()):
            whole = out[at : at + prod(run.sizes)].view(run.sizes)
            at += whole.numel()
            first = [o + s for o, s in zip(box.offsets, run.offsets, strict=True)]
            for chunk in self._chunks[key]:
                low = [max(f, o) for f, o in zip(first, chunk.offsets, strict=True)]
                high = [
                    min(f + n, o + s) for f, n, o, s in zip(first, whole.shape, chunk.offsets, chunk.sizes, strict=True)
                ]
                if any(a >= b for a, b in zip(low, high, strict=True)):
                    continue
                part = whole[tuple(slice(a - f, b - f) for a, b, f in zip(low, high, first, strict=True))]
                with open(self._folder / chunk.place.relative_path, "rb") as file:
                    stored = _StoredChunk(file, self._begin_of(file, key, chunk), chunk.sizes, self.dtype(key), piece)
                    stored.copy([a - o for a, o in zip(low, chunk.offsets, strict=True)], part)
                filled += part.numel()
        return filled

    def _begin_of(self, file: BinaryIO, key: str, chunk: _Chunk) -> int:
        """Where in its file the numbers of a chunk begin: torch.save writes a zip archive, and them uncompressed."""
        place = chunk.place
        index = (place.relative_path, place.offset)
        if index not in self._begins:
            view: Any = _create_file_view(file, place.offset, place.length)  # type: ignore[arg-type]
            reader: Any = torch._C.PyTorchFileReader(view)
            offset: int = reader.get_record_offset("data/0")
            if offset + prod(chunk.sizes) * self.dtype(key).itemsize > place.length:
                raise ValueError(f"{key} is not stored whole")
            self._begins[index] = place.offset + offset
        return self._begins[index]

    def _load(self, key: str, chunk: _Chunk) -> Tensor:
        path = self._folder / chunk.place.relative_path
        try:
            with open(path, "rb") as file:
                view: Any = _create_file_view(file, chunk.place.offset, chunk.place.length)
                tensor: Tensor = torch.load(view, map_location="cpu", weights_only=True)
            return tensor.detach().view(chunk.sizes)
        except Exception as error:  # as above
            words = " ".join(str(error).split())[:200]
            raise ConfigError(f"{path} is damaged: {key} cannot be read ({type(error).__name__}: {words})") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)


def boxes(sizes: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """The numbers from begin to end of a tensor taken as flat, as boxes of it in their order."""
    if begin >= end:
        return
    if len(sizes) == 1:
        yield Box((begin,), (end - begin,))
        return
    inner = sizes[1:]
    row = prod(inner)
    first, last = -(-begin // row), end // row  # rows that are whole
    if begin < first * row:
        skipped = (first - 1) * row
        yield from _in_row(first - 1, boxes(inner, begin - skipped, min(end - skipped, row)))
    if first < last:
        yield Box((first, *(0 for _ in inner)), (last - first, *inner))
    if first <= last:
        yield from _in_row(last, boxes(inner, 0, end - last * row))


def _in_row(row: int, inner: Iterator[Box]) -> Iterator[Box]:
    return (Box((row, *box.offsets), (1, *box.sizes)) for box in inner)


@dataclass(frozen=True, slots=True)
class _StoredChunk:
    """A contiguous tensor in an open file."""

    file: BinaryIO
    begin: int
    sizes: tuple[int, ...]
    dtype: torch.dtype
    piece: int
    """Numbers to hold at a time."""

    def copy(self, offsets: list[int], out: Tensor) -> None:
        """Fill a tensor from the box of its shape at these offsets. Raises: ValueError if the file ends before it."""
        strides = [prod(self.sizes[axis + 1 :]) for axis in range(len(self.sizes))]
        wide = [axis for axis, size in enumerate(out.shape) if size > 1]
        axis = wide[0] if wide else 0
        step = max(1, self.piece // strides[axis]) if wide else 1
        is_deep = strides[axis] > self.piece and len(wide) > 1  # one step is still too much
        for start in range(0, out.shape[axis], step):
            part = out.narrow(axis, start, min(step, out.shape[axis] - start))
            at = [offset + (start if a == axis else 0) for a, offset in enumerate(offsets)]
            if is_deep:
                self.copy(at, part)
                continue
            first = sum(offset * stride for offset, stride in zip(at, strides, strict=True))
            span = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, strides, strict=True))
            part.copy_(self.read(first, span).as_strided(part.shape, strides))

    def read(self, first: int, count: int) -> Tensor:
        """[count]: the numbers from `first` on."""
        width = self.dtype.itemsize
        self.file.seek(self.begin + first * width)
        data = np.fromfile(self.file, dtype=np.uint8, count=count * width)
        if len(data) != count * width:
            raise ValueError(f"{self.file.name} ends too early")
        return torch.from_numpy(data).view(self.dtype)
