"""Weight sync: trainer to engines, verified. plan.py has the order; one file per transport."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vime.config import Config
    from vime.protocols import BucketWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How the weights of a run travel."""

    transport: str
    """Module of this package: "shm", "gloo" or "disk"."""
    host: str
    """The sender's address that the engines can reach."""
    num_readers: int
    """Engine worker processes, over all engines."""


def make_writer(route: Route, config: Config) -> BucketWriter:
    """The trainer's end of a transport, as the settings want it. Called once, in the process that sends.

    Raises: ValueError on a transport that does not exist.
    """
    if route.transport == "shm":
        from vime.weight_sync import shm

        return shm.Writer()
    if route.transport == "disk":
        from vime.weight_sync import disk

        return disk.Writer(Path(config.sync.update_weight_disk_dir or Path(config.log.run_dir) / "weight_sync"))
    if route.transport == "gloo":
        from vime.weight_sync import gloo

        return gloo.Writer(route.host, route.num_readers, config.sync.update_weight_timeout_s)
    raise ValueError(f"--update-weight-transport is {route.transport!r}; there are shm, disk and gloo")
