"""A checkpoint written at once, for tests of what is done with it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vime.loop.cadence import StopRule
from vime.loop.checkpoint_writing import CheckpointWriting
from vime.protocols import DataSource, Trainer


def save_checkpoint(
    folder: Path,
    rollout_id: int,
    trainer: Trainer,
    source: DataSource,
    stop: StopRule,
    settings: Mapping[str, Any],
) -> Path:
    """Write the checkpoint of a trained rollout. Returns: its final path. See `CheckpointWriting`."""
    writing = CheckpointWriting(folder, rollout_id, trainer, source.state(), stop, settings, in_background=False)
    path = writing.complete(wait=True)
    assert path is not None, "waited for"
    return path
