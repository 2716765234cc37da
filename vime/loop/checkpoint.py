"""One checkpoint of everything: model, optimizer, random state and data cursor, all of it there or none.

A checkpoint is a folder `rollout_000041/` holding `trainer/` (the trainer's own files) and `state.json` (data buffer
and counters). It is written under a temporary name and renamed when complete, so a folder with the final name is whole.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.errors import ConfigError, TrainingError, VimeError
from vime.protocols import DataSource, Trainer

_NAME = re.compile(r"rollout_(\d{6,})")
_FORMAT = 1
_FULL_BYTES = 16 << 20  # less space than this is none


@dataclass(frozen=True, slots=True)
class Restored:
    """Where a resumed run goes on."""

    next_rollout_id: int
    path: Path


def save_checkpoint(folder: Path, rollout_id: int, trainer: Trainer, source: DataSource) -> Path:
    """Write the checkpoint of a trained rollout.

    Args: folder: holds all checkpoints of the run. rollout_id: the last rollout that was trained on.
    Returns: the checkpoint's final path. Raises: OSError when the disk is full; no partial checkpoint stays.
    """
    final = folder / f"rollout_{rollout_id:06d}"
    partial = folder / f".partial_{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        trainer.save(partial / "trainer")
        state = {"format": _FORMAT, "rollout_id": rollout_id, "data_source": source.state()}
        with open(partial / "state.json", "w", encoding="utf-8") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        if final.exists():  # the same rollout, trained again after a resume from an earlier one
            old = folder / f".replaced_{final.name}"
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
            partial.rename(final)
            shutil.rmtree(old)
        else:
            partial.rename(final)
    except BaseException as error:
        free = shutil.disk_usage(folder).free
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, VimeError) and free < _FULL_BYTES:  # the writers' own words are of positions and ranks
            raise OSError(errno.ENOSPC, f"checkpoint of rollout {rollout_id}: the disk is full", str(folder)) from error
        raise
    return final


def find_latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in `folder`, or None when there is none."""
    if not folder.is_dir():
        return None
    found = [
        (int(m[1]), p) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name)) and (p / "state.json").is_file()
    ]
    return max(found)[1] if found else None


def load_checkpoint(folder: Path, trainer: Trainer, source: DataSource) -> Restored:
    """Restore the newest checkpoint of `folder` into trainer and data source.

    Raises: ConfigError when the folder holds none, or one of an unknown format; TrainingError when it is damaged.
    """
    path = find_latest(folder)
    if path is None:
        raise ConfigError(f"--load {folder}: no checkpoint there (looked for rollout_NNNNNN/state.json)")
    remedy = "move it away to go on from the one before it"
    try:
        state: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"--load {path}: state.json is damaged ({error}); {remedy}") from error
    if state.get("format") != _FORMAT:
        raise ConfigError(f"--load {path}: checkpoint format {state.get('format')!r}, this vime reads {_FORMAT}")
    try:
        trainer.load(path / "trainer")
    except TrainingError as error:
        raise TrainingError(f"--load {path} cannot be loaded; if it is damaged, {remedy}: {error}") from error
    source.restore(state["data_source"])
    return Restored(int(state["rollout_id"]) + 1, path)
