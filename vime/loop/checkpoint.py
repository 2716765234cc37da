"""One checkpoint of everything: model, optimizer, random state and data cursor, all of it there or none.

A checkpoint is a folder `rollout_000041/` holding `trainer/` (the trainer's own files), `state.json` (data buffer,
counters, the settings it depends on, sizes and checksums of the files) and, once its step has ended, `metrics.json`
(that step's metrics). It is written under a temporary name and renamed when complete, so one with the final name is
whole; what damages it later is found by the sizes and checksums. `vime convert` makes folders of weights alone, with
`weights.json` instead. Here checkpoints are found, checked and loaded; checkpoint_writing.py writes them.
"""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vime.errors import ConfigError, DataError, TrainingError
from vime.loop.cadence import StopRule
from vime.loop.file_sums import damage_of
from vime.protocols import DataSource, Trainer

_NAME = re.compile(r"rollout_(\d{6,})")
FORMAT = 2
"""Of state.json and weights.json; a reader of another one refuses it."""
WEIGHTS_FILE = "weights.json"
"""Marks a folder of weights alone, and says of which model."""
_REMEDY = "move it away to go on from the one before it, or name another by --ckpt-step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint, as its state.json describes it."""

    path: Path
    rollout_id: int
    """The last rollout that was trained on."""
    data_source: Mapping[str, Any]
    stop: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the run that wrote it, see vime/loop/compatibility.py."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of its step, as they were when it was written: without what came after."""
    is_weights_alone: bool = False
    """Converted: no run has written it, and there is nothing to go on from but weights."""
    skipped: Sequence[tuple[Path, str]] = ()
    """Newer ones that are damaged, and what is wrong with each."""


def find_checkpoints(folder: Path) -> list[Path]:
    """Every complete checkpoint in `folder`, oldest first."""
    if not folder.is_dir():
        return []
    found = [
        (int(m[1]), p) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name)) and (p / "state.json").is_file()
    ]
    return [path for _, path in sorted(found)]


def rollout_of(path: Path) -> int:
    """The rollout that a checkpoint's folder is called after."""
    return int(path.name.removeprefix("rollout_"))


def open_checkpoint(folder: Path, rollout_id: int | None = None, *, flag: str = "--load ") -> Checkpoint:
    """The newest undamaged checkpoint of `folder`, or that of a certain rollout; nothing is loaded yet.

    Args: flag: what errors say before the folder's name.
    Raises: ConfigError when there is none, that of the rollout is damaged, or it is of an unknown format.
    """
    if (folder / WEIGHTS_FILE).is_file():
        return _open_weights(folder, rollout_id, flag)
    found = find_checkpoints(folder)
    if not found:
        raise ConfigError(f"{flag}{folder}: no checkpoint there (looked for rollout_NNNNNN/state.json){_hint(folder)}")
    if rollout_id is not None:
        by_number = {rollout_of(p): p for p in found}
        if rollout_id not in by_number:
            raise ConfigError(
                f"--ckpt-step is {rollout_id}, but {flag}{folder} has the checkpoints of rollouts "
                f"{', '.join(map(str, by_number))}"
            )
        found = [by_number[rollout_id]]
    skipped: list[tuple[Path, str]] = []
    for path in reversed(found):
        checkpoint = _read(path, flag)
        if isinstance(checkpoint, Checkpoint):
            return replace(checkpoint, skipped=skipped)
        skipped.append((path, checkpoint))
    raise ConfigError([f"{flag}{path} is damaged: {damage}; {_REMEDY}" for path, damage in skipped])


def _read(path: Path, flag: str) -> Checkpoint | str:
    """One checkpoint, or in what it is damaged. Raises: ConfigError if it is another one than its name says."""
    try:
        state: Any = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"state.json cannot be read ({error})"
    if isinstance(state, dict) and "format" in state and state["format"] != FORMAT:
        raise ConfigError(f"{flag}{path}: checkpoint format {state['format']!r}, this vime reads {FORMAT}")
    if damage := _damage(state):
        return f"in state.json {damage}"
    if state.get("seal", seal := seal_of(state)) != seal:
        return "state.json is not what was written: its seal is broken"
    if state["rollout_id"] != rollout_of(path):
        raise ConfigError(
            f"{flag}{path} is the checkpoint of rollout {state['rollout_id']} under another name; call it "
            f"rollout_{state['rollout_id']:06d}"
        )
    if damage := damage_of(path, state.get("files", {})):  # older ones do not say
        return damage
    return Checkpoint(
        path=path,
        rollout_id=state["rollout_id"],
        data_source=state["data_source"],
        stop=state["stop"],
        settings=state["settings"],
        metrics=state.get("metrics", {}),  # older ones do not say
    )


def _hint(folder: Path) -> str:
    """What the folder is instead, if that can be seen."""
    if (folder / "config.json").is_file():
        return "; it is an HF checkpoint: give it as --hf-checkpoint"
    if (folder / "state.json").is_file():
        return f"; it is one checkpoint: give --load {folder.parent} and --ckpt-step"
    if (folder / "latest_checkpointed_iteration.txt").is_file():
        return (
            "; Megatron-LM's own training loop has written it, which is not read: export it to an HF checkpoint there"
        )
    return ""


def _open_weights(folder: Path, rollout_id: int | None, flag: str) -> Checkpoint:
    if rollout_id is not None:
        raise ConfigError(f"--ckpt-step is {rollout_id}, but {flag}{folder} holds weights alone, of no rollout")
    try:
        weights = json.loads((folder / WEIGHTS_FILE).read_text(encoding="utf-8"))
        settings, sizes = weights["settings"], weights["files"]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise ConfigError(f"{flag}{folder}: {WEIGHTS_FILE} is damaged ({error!r}); convert it again") from error
    if damage := damage_of(folder, sizes):
        raise ConfigError(f"{flag}{folder} is damaged: {damage}; convert it again")
    return Checkpoint(path=folder, rollout_id=-1, data_source={}, stop={}, settings=settings, is_weights_alone=True)


def weights_of(folder: Path, rollout_id: int | None) -> tuple[Path, Mapping[str, Any] | None]:
    """The trainer's part of a checkpoint, and the settings it was written under where they are known.

    Args:
        folder: a run's checkpoints, one of them, the trainer's part of one, or converted weights.
        rollout_id: which of a run's; None: the newest.
    Raises: ConfigError if there is none, or it is damaged.
    """
    if (folder / "metadata.json").is_file():
        return folder, None
    if (folder / "state.json").is_file():
        if not _NAME.fullmatch(folder.name):
            raise ConfigError(f"{folder} is a checkpoint under another name; call it rollout_ and what state.json says")
        if rollout_id not in (None, rollout_of(folder)):
            raise ConfigError(f"--ckpt-step is {rollout_id}, but {folder} is the checkpoint of another rollout")
        folder, rollout_id = folder.parent, rollout_of(folder)
    checkpoint = open_checkpoint(folder, rollout_id, flag="")
    return checkpoint.path / "trainer", checkpoint.settings


def seal_of(state: Mapping[str, Any]) -> int:
    """The checksum of a state.json, of all but its seal."""
    rest = {key: value for key, value in state.items() if key != "seal"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def _damage(state: Any) -> str | None:
    """What a state.json lacks."""
    if not isinstance(state, dict):
        return "is no JSON object"
    for key, kind in (
        ("format", int),
        ("rollout_id", int),
        ("data_source", dict),
        ("stop", dict),
        ("settings", dict),
    ):
        if not isinstance(state.get(key), kind):
            return f"{key!r} is missing or no {'number' if kind is int else 'object'}"
    return None


def load_checkpoint(checkpoint: Checkpoint, trainer: Trainer, source: DataSource, stop: StopRule) -> None:
    """Bring trainer, data source and stop rule to where they were.

    Raises: DataError if the data source is another; TrainingError when the trainer's files are damaged.
    """
    if checkpoint.data_source.get("replayed") and source.state() != checkpoint.data_source:
        raise DataError(
            f"--load {checkpoint.path} was written by a run with --load-debug-rollout-data, which read no prompts, so "
            "it does not say which come next; take its weights alone with --finetune"
        )
    source.restore(checkpoint.data_source)
    try:
        stop.restore(checkpoint.stop)
    except (KeyError, TypeError) as error:
        raise DataError(
            f"--load {checkpoint.path}: in state.json the stop rule is damaged ({error!r}); {_REMEDY}"
        ) from error
    load_weights(checkpoint, trainer)


def load_weights(checkpoint: Checkpoint, trainer: Trainer) -> None:
    """Bring the trainer alone to where it was. Raises: TrainingError when its files are damaged."""
    try:
        trainer.load(checkpoint.path / "trainer")
    except TrainingError as error:
        older = [path for path in find_checkpoints(checkpoint.path.parent) if path.name < checkpoint.path.name]
        which = f" ({rollout_of(older[-1])})" if older else ""
        raise TrainingError(
            f"--load {checkpoint.path} cannot be loaded; if damaged, {_REMEDY}{which}: {error}"
        ) from error


def set_aside(checkpoint: Checkpoint) -> list[Path]:
    """Rename the damaged ones that were passed over, so that no later run takes them for its newest: new paths."""
    moved = []
    for path, _ in checkpoint.skipped:
        for k in itertools.count():
            aside = path.with_name(f"damaged_{path.name}" + (f"_{k}" if k else ""))
            if not aside.exists():
                path.rename(aside)
                moved.append(aside)
                break
    return moved


def read_metrics(checkpoint: Path) -> dict[str, float]:
    """What `write_metrics` wrote; empty where the run ended before its step did. Raises: TrainingError if damaged."""
    path = checkpoint / "metrics.json"
    if not path.is_file():
        return {}
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        metrics = None
    if not isinstance(metrics, dict) or not all(isinstance(value, int | float) for value in metrics.values()):
        raise TrainingError(f"{path} is damaged; remove it, and its checkpoint counts as one without metrics")
    return metrics
