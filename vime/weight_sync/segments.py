"""Segments of shared memory as files: made under a lock, and removed once their maker is gone.

A segment whose lock is free has no living maker. Python's SharedMemory is not used: its resource tracker unlinks
segments that a reader merely attached to (before Python 3.13), and leaves those of a killed writer.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from pathlib import Path

SHM_FOLDER = Path("/dev/shm")
NAME = re.compile(r"vime-\d+-\d+-[0-9a-f]{16}")


def locked_file(folder: Path) -> tuple[Path, int]:
    """A new segment, empty and locked. Returns: its path, and its open file, which holds the lock until closed."""
    while True:
        path = folder / f"vime-{os.getuid()}-{os.getpid()}-{secrets.token_hex(8)}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return path, file
        os.close(file)  # a sweep of another run's came between the making and the locking, and unlinked it


def remove_stale_segments(folder: Path = SHM_FOLDER) -> list[str]:
    """Unlink this user's segments whose writer is gone (their lock is free). Returns: their names."""
    removed = []
    for path in sorted(folder.glob(f"vime-{os.getuid()}-*")):
        if not NAME.fullmatch(path.name):
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
