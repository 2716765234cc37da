"""What is known of a run before any of its processes starts, and what has been started when the rest is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.config import Config
from vime.loop.checkpoint import Checkpoint
from vime.observability.progress import RunProgress
from vime.observability.run_folder import RunFolder
from vime.observability.start_times import StartTimes
from vime.orchestration.cluster import Reservation
from vime.orchestration.fleet import Fleet
from vime.orchestration.placement import Layout, Placement
from vime.orchestration.sharing import DevicePlan
from vime.platform.base import Platform
from vime.weight_sync import Route


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The settings, and what was read off them."""

    config: Config
    hf_path: Path
    hf_config: dict[str, Any]
    layout: Layout
    folder: RunFolder
    progress: RunProgress
    generates: bool
    overlapped: bool
    checkpoint: Checkpoint | None
    """Where the run goes on; None from the start."""
    start: int
    """The first rollout."""
    kept_settings: Mapping[str, Any]
    """What its checkpoints say of its settings."""
    times: StartTimes
    """Of the program's start."""


@dataclass(frozen=True, slots=True)
class Started:
    """What runs already when the rest is built."""

    platform: Platform
    placement: Placement
    reservation: Reservation
    route: Route | None
    """How weights go; None where none do."""
    devices: DevicePlan | None
    """Of devices that trainer and engines share."""
    fleet: Fleet | None
    """Engines that are starting; None where nothing is generated."""
