"""One file of a checkpoint in torch's distributed format: items one behind the other, each as torch.save writes it.

torch's own FileSystemWriter keeps every tensor it has written until the file is closed, and megatron-core's forks
processes that outlive a killed trainer; this writes and forgets, in the thread that calls it.
"""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult


class ShardFile:
    """A context manager: on a clean exit the file is on the disk. `results` says where each item lies.

    Args:
        folder: of the checkpoint.
        rank: which rank's file; readers only want the names to differ.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._name = f"__{rank}_0{DEFAULT_SUFFIX}"
        self._file = open(folder / self._name, "wb")
        self._stream = _Stream(self._file)
        self.results: list[WriteResult] = []

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def add(self, index: MetadataIndex, data: Tensor | BytesIO) -> None:
        """Append one item: a tensor, moved to the host first, or bytes that torch.save has made already.

        Raises: OSError if there is no room.
        """
        start = self._file.tell()
        try:
            if isinstance(data, BytesIO):
                self._stream.write(data.getbuffer())
            else:
                torch.save(_alone(data.detach().cpu()), self._stream)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise self._stream.error or error from error
        length = self._file.tell() - start
        place: Any = _StorageInfo(self._name, start, length)
        self.results.append(WriteResult(index=index, size_in_bytes=length, storage_data=place))


class _Stream:
    """A file for torch.save, whose own error says no more than that it is not where it should be."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Left to the end of the file."""


def _alone(tensor: Tensor) -> Tensor:
    """The tensor with no more storage than its own: torch.save writes all of it."""
    is_view = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
    return tensor.clone() if is_view else tensor
