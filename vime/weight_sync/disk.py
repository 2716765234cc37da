"""The disk transport: each bucket is a file in a folder that trainer and engines both see.

The previous bucket's file is removed when the next is written, so that at most one lies there at a time. The writer
holds a lock on its file; one whose lock is free was left by a writer that was killed, and the next writer removes it.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from vime.errors import WeightSyncError
from vime.weight_sync.layout import bucket_specs, copy_into, view_tensors
from vime.wire import BucketMessage

_SUFFIX = ".vime-bucket"
_NAME = re.compile(r"v\d+-\d+-[0-9a-f]{16}\.(vime-bucket|partial)")


class Writer:
    """The trainer's end.

    Args:
        folder: made if needed; for engines on other nodes it must be on a file system that they share.
        after_write: called with each finished file and its version, before the engines are told of it.
    """

    def __init__(self, folder: Path, after_write: Callable[[Path, int], None] | None = None) -> None:
        self._after_write = after_write
        self._folder = folder.resolve()
        self._current: Path | None = None
        self._file: BinaryIO | None = None
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_stale_buckets(self._folder)

    def write(self, tensors: Sequence[tuple[str, Any]], version: int, index: int) -> BucketMessage:
        """Write the tensors to a file that is complete once it has its name.

        Raises: WeightSyncError if the disk is full or the folder cannot be written.
        """
        self._remove_current()
        specs, num_bytes = bucket_specs(tensors)
        path = self._folder / f"v{version}-{index}-{secrets.token_hex(8)}{_SUFFIX}"
        partial = path.with_suffix(".partial")
        data = torch.zeros(num_bytes, dtype=torch.uint8)
        copy_into(data, tensors, specs)
        try:
            self._file = partial.open("wb")
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._file.write(data.numpy().data)
            self._file.flush()
            os.fsync(self._file.fileno())  # the reader may be on another node
            partial.rename(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            self._close_file()
            raise WeightSyncError(f"cannot write a bucket of {num_bytes} bytes to {self._folder}: {error}") from error
        self._current = path
        if self._after_write is not None:
            self._after_write(path, version)
        return BucketMessage(version, index, specs, num_bytes, {"path": str(path)})

    def call_off(self) -> None:
        """Nobody waits for a bucket here."""

    def close(self) -> None:
        """Remove the last bucket's file."""
        self._remove_current()

    def _remove_current(self) -> None:
        if self._current is not None:
            self._current.unlink(missing_ok=True)
            self._current = None
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def remove_stale_buckets(folder: Path) -> list[str]:
    """Remove the buckets whose writer is gone (their lock is free). Returns: their names."""
    removed = []
    for path in sorted(folder.iterdir()):
        if not _NAME.fullmatch(path.name):
            continue
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            removed.append(path.name)
        except BlockingIOError:
            pass  # its writer lives
        except FileNotFoundError:
            pass  # its writer, or another sweep, was faster
    return removed


class Reader:
    """The engine's end."""

    def read(self, bucket: BucketMessage) -> list[tuple[str, Any]]:
        """[(HF name, tensor)]. Raises: WeightSyncError if the file is missing or too short."""
        path = Path(str(bucket.location.get("path")))
        if path.suffix != _SUFFIX:
            raise WeightSyncError(f"{path} is not a bucket of vime's")
        try:
            data = np.fromfile(path, dtype=np.uint8)
        except OSError as error:
            raise WeightSyncError(
                f"cannot read bucket {bucket.index} from {path}: {error}; does the engine's node see "
                "--update-weight-disk-dir?"
            ) from error
        return view_tensors(torch.from_numpy(data), bucket)

    def close(self) -> None:
        """Nothing is held between buckets."""
