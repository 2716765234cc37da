"""Tensors of a checkpoint in torch's distributed format, read one at a time, by one process and without any model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from vime.errors import ConfigError


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
            metadata = FileSystemReader(folder).read_metadata()
            if not isinstance(metadata, Metadata):
                raise TypeError(f".metadata holds a {type(metadata).__name__}")
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
