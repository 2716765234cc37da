"""The shm transport: two shared-memory segments on this node, rewritten in turn, bucket by bucket.

A segment is a file under /dev/shm, mapped by both ends. The writer holds a lock on its segment; a segment whose lock is
free has no living writer, and the next writer removes it (segments.py).
"""

from __future__ import annotations

import atexit
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from vime.errors import WeightSyncError
from vime.weight_sync.layout import checked_length, lay_out
from vime.weight_sync.segments import NAME, SHM_FOLDER, locked_file, remove_stale_segments
from vime.wire import BucketMessage


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
        if not NAME.fullmatch(name):
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
        self.size = num_bytes
        self._pid = os.getpid()
        self._path, self._file = locked_file(folder)
        self.name = self._path.name
        try:
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
