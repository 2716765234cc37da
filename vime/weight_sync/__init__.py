"""Weight sync: trainer to engines, verified. plan.py has the order; one file per transport."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vime.config import Config
    from vime.protocols import BucketWriter


def make_writer(transport: str, config: Config) -> BucketWriter:
    """The trainer's end of a transport, as the settings want it. Called once, in the process that sends.

    Raises: ValueError on a transport that does not exist.
    """
    if transport == "shm":
        from vime.weight_sync import shm

        return shm.Writer()
    if transport == "disk":
        from vime.weight_sync import disk

        return disk.Writer(Path(config.sync.update_weight_disk_dir or Path(config.log.run_dir) / "weight_sync"))
    raise ValueError(f"--update-weight-transport is {transport!r}; there are shm and disk")
