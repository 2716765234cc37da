"""One run at a time in a folder: two would remove each other's unfinished files, and mix the finished."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vime.errors import ConfigError

logger = logging.getLogger(__name__)

LOCK_FILE = ".in_use"


@contextmanager
def only_run_in(folder: Path, flag: str = "--save") -> Iterator[None]:
    """Hold the folder, which is made if it is not there. The lock is the process's: it ends with it, however it ends.

    Args: flag: that names the folder, for messages.
    Raises: ConfigError if another run holds it; OSError if no file can be made there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # POSIX locks, unlike flock's, stay behind in a fork: no child of a killed run keeps its folder from the next.
    with open(folder / LOCK_FILE, "a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise ConfigError(
                    f"{flag} {folder} is written to by another run ({holder}); end it, or give another folder"
                ) from error
            logger.warning("%s %s cannot be locked (%s); see to it that no other run writes there", flag, folder, error)
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield
