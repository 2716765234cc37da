"""The shm transport: two shared-memory segments on this node, rewritten in turn, bucket by bucket.

A segment is a file under /dev/shm, mapped by both ends. Python's SharedMemory is not used: its resource tracker
unlinks segments that a reader merely attached to (before Python 3.13), and leaves those of a killed writer. Here the
writer holds a lock on its segment; a segment whose lock is free has no living writer, and the next writer removes it.
"""

from __future__ import annotations

import atexit
import fcntl
import mmap
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from vime.errors import WeightSyncError
from vime.weight_sync.layout import checked_length, lay_out
from vime.wire import BucketMessage

SHM_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"vime-\d+-\d+-[0-9a-f]{16}")


class Writer:
    """The trainer's end. Its segments grow to the largest bucket and are unlinked by close(), or at exit.

    Args: folder: where segments live; another one only in tests.
    """

    def __init__(self, folder: Path = SHM_FOLDER) -> None:
        self._folder = folder
        self._segments: dict[int, _Segment] = {}
        remove_stale_segments(folder)
        atexit.register(self.close)

    def write(
        self, outlines: Sequence[tuple[str, Any]], contents: Iterable[Any], version: int, index: int
    ) -> BucketMessage:
        """Lay the tensors out in a segment, over the bucket before the previous one.

        Raises: WeightSyncError if shared memory is too small for the bucket.
        """
        turn = index % 2
        specs, data = lay_out(outlines, contents, lambda num_bytes: self._place(turn, num_bytes))
        return BucketMessage(version, index, specs, data.numel(), {"shm": self._segments[turn].name})

    def _place(self, turn: int, num_bytes: int) -> torch.Tensor:
        segment = self._segments.get(turn)
        if segment is None or segment.size < num_bytes:
            if segment is not None:
                self._segments.pop(turn).close()
            segment = self._segments[turn] = _Segment(self._folder, num_bytes)
        return segment.tensor[:num_bytes]

    def call_off(self) -> None:
        """Nobody waits for a bucket here."""

    def close(self) -> None:
        """Unlink the segments; harmless when there are none."""
        while self._segments:
            self._segments.popitem()[1].close()
        atexit.unregister(self.close)


class Reader:
    """The engine's end: the writer's segments, mapped once each."""

    def __init__(self, folder: Path = SHM_FOLDER) -> None:
        self._folder = folder
        self._mapped: dict[str, torch.Tensor] = {}

    def read(self, bucket: BucketMessage, device: torch.device) -> torch.Tensor:
        """The bucket's bytes, copied to `device`. Raises: WeightSyncError if the segment is gone or too short."""
        name = str(bucket.location.get("shm"))
        if not _NAME.fullmatch(name):
            raise WeightSyncError(f"{name!r} is not the name of a segment of vime's")
        if name not in self._mapped:
            for other in [other for other in self._mapped if not (self._folder / other).exists()]:
                del self._mapped[other]
            try:
                with (self._folder / name).open("r+b") as file:
                    mapped = mmap.mmap(file.fileno(), 0)  # writable, because torch has no read-only tensors
            except FileNotFoundError:
                raise WeightSyncError(
                    f"shared-memory segment {name} is gone; did the trainer end, or run on another node? "
                    "Use --update-weight-transport gloo or disk across nodes"
                ) from None
            self._mapped[name] = torch.frombuffer(mapped, dtype=torch.uint8)
        return checked_length(self._mapped[name], bucket).to(device, copy=True)

    def end_sync(self) -> None:
        """The segments stay mapped for the next sync."""

    def close(self) -> None:
        """Unmap."""
        self._mapped.clear()  # a mapping goes with the last tensor that views it


class _Segment:
    """A locked file under /dev/shm with all its pages reserved."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.name = f"vime-{os.getuid()}-{os.getpid()}-{secrets.token_hex(8)}"
        self.size = num_bytes
        self._pid = os.getpid()
        self._path = folder / self.name
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            # Reserve now: a full /dev/shm would otherwise show as a bus error in the middle of a copy.
            os.posix_fallocate(self._file, 0, num_bytes)
        except OSError as error:
            self.close()
            raise WeightSyncError(
                f"{folder} has no room for a bucket of {num_bytes} bytes ({error.strerror}); lower "
                "--update-weight-buffer-size, enlarge shared memory, or use --update-weight-transport disk"
            ) from error
        self.tensor = torch.frombuffer(mmap.mmap(self._file, num_bytes), dtype=torch.uint8)

    def close(self) -> None:
        # A forked child inherits the object; only its maker may unlink.
        if self._pid == os.getpid():
            self._path.unlink(missing_ok=True)
        os.close(self._file)


def remove_stale_segments(folder: Path = SHM_FOLDER) -> list[str]:
    """Unlink this user's segments whose writer is gone (their lock is free). Returns: their names."""
    removed = []
    for path in sorted(folder.glob(f"vime-{os.getuid()}-*")):
        if not _NAME.fullmatch(path.name):
            continue
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # its writer, or another sweep, was faster
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path.name)
        except BlockingIOError:
            pass  # its writer lives
        finally:
            os.close(file)
    return removed
