"""Weight sync: trainer to engines, verified. plan.py has the order; one file per transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vime.config import Config
    from vime.protocols import BucketWriter


COLLECTIVE = ("ipc",)
"""Transports whose writer is on every training rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How the weights of a run travel."""

    transport: str
    """Module of this package: "ipc", "nccl", "shm", "gloo" or "disk"."""
    host: str
    """The sender's address that the engines can reach."""
    num_readers: int
    """Engine worker processes, over all engines."""
    why: str = ""
    """Which better transports do not reach the engines."""


def make_writer(route: Route, config: Config) -> BucketWriter:
    """The trainer's end of a transport, as the settings want it. Called once: on rank 0, or on all (COLLECTIVE).

    Raises: ValueError on a transport that does not exist.
    """
    if route.transport == "shm":
        from vime.weight_sync import shm

        return shm.Writer()
    if route.transport == "disk":
        from vime.weight_sync import disk

        folder = Path(config.sync.update_weight_disk_dir or Path(config.log.run_dir) / "weight_sync")
        return disk.Writer(folder, after_write=_after_write(config))
    if route.transport == "gloo":
        from vime.weight_sync import gloo

        return gloo.Writer(route.host, route.num_readers, config.sync.update_weight_timeout_s)
    if route.transport == "nccl":
        from vime.weight_sync import nccl

        return nccl.Writer(route.host, route.num_readers, config.sync.update_weight_timeout_s)
    if route.transport == "ipc":
        from vime.weight_sync import ipc

        return ipc.Writer(config.sync.update_weight_buffer_size)
    raise ValueError(f"--update-weight-transport is {route.transport!r}; there are ipc, nccl, shm, gloo and disk")


def _after_write(config: Config) -> Callable[[Path, int], None] | None:
    """--custom-update-weight-post-write-path, with its context."""
    from vime.config import hook_table
    from vime.protocols import TrainerContext

    function = hook_table.load(config, "sync.custom_update_weight_post_write_path")
    if function is None:
        return None
    context = TrainerContext(config, rank=0, world_size=1)

    def after_write(path: Path, version: int) -> None:
        if (result := function(context, path, version)) is not None:
            raise function.refuse(result, "None")

    return after_write
