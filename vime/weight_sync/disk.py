"""The disk transport: each bucket is a file in a folder that trainer and engines both see.

A bucket's file is removed when the next but one is written, so that at most two lie there at a time. The writer holds a
lock on its files; one whose lock is free was left by a writer that was killed, and the next writer removes it.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from vime.errors import WeightSyncError
from vime.weight_sync.layout import checked_length, lay_out
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
        self._files: dict[int, tuple[Path, BinaryIO]] = {}
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_stale_buckets(self._folder)

    def write(
        self, outlines: Sequence[tuple[str, Any]], contents: Iterable[Any], version: int, index: int
    ) -> BucketMessage:
        """Write the tensors to a file that is complete once it has its name.

        Raises: WeightSyncError if the disk is full or the folder cannot be written.
        """
        self._remove(index % 2)
        specs, data = lay_out(outlines, contents, lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8))
        num_bytes = data.numel()
        path = self._folder / f"v{version}-{index}-{secrets.token_hex(8)}{_SUFFIX}"
        partial = path.with_suffix(".partial")
        try:
            with ExitStack() as stack:
                file = stack.enter_context(partial.open("wb"))
                fcntl.flock(file, fcntl.LOCK_EX)
                file.write(data.numpy().data)
                file.flush()
                os.fsync(file.fileno())  # the reader may be on another node
                partial.rename(path)
                stack.pop_all()  # open, and so locked, for as long as the file is there
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise WeightSyncError(f"cannot write a bucket of {num_bytes} bytes to {self._folder}: {error}") from error
        self._files[index % 2] = (path, file)
        if self._after_write is not None:
            self._after_write(path, version)
        return BucketMessage(version, index, specs, num_bytes, {"path": str(path)})

    def call_off(self) -> None:
        """Nobody waits for a bucket here."""

    def close(self) -> None:
        """Remove the last buckets' files."""
        for turn in (0, 1):
            self._remove(turn)

    def _remove(self, turn: int) -> None:
        if turn in self._files:
            path, file = self._files.pop(turn)
            path.unlink(missing_ok=True)
            file.close()


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

    def read(self, bucket: BucketMessage, device: torch.device) -> torch.Tensor:
        """The bucket's bytes on `device`. Raises: WeightSyncError if the file is missing or too short."""
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
        return checked_length(torch.from_numpy(data), bucket).to(device)

    def end_sync(self) -> None:
        """Nothing is held between buckets."""

    def close(self) -> None:
        """Nothing is held between buckets."""
