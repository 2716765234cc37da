"""One checkpoint of everything: model, optimizer, random state and data cursor, all of it there or none.

A checkpoint is a folder `rollout_000041/` holding `trainer/` (the trainer's own files), `state.json` (data buffer,
counters, the settings it depends on, sizes and checksums of the files) and, once its step has ended, `metrics.json`
(that step's metrics). It is written under a temporary name and renamed when complete, so one with the final name is
whole; what damages it later is found by the sizes and checksums. `vime convert` makes folders of weights alone, with
`weights.json` instead.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vime.errors import ConfigError, DataError, TrainingError, VimeError
from vime.loop.cadence import StopRule
from vime.loop.file_sums import damage_of, sums_of
from vime.protocols import DataSource, Trainer

_NAME = re.compile(r"rollout_(\d{6,})")
_FORMAT = 2
WEIGHTS_FILE = "weights.json"
"""Marks a folder of weights alone, and says of which model."""
_FULL_BYTES = 16 << 20  # less space than this is none
_SOON_BYTES = 16 << 20  # are read in hundredths of a second: no thread is needed
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
    is_weights_alone: bool = False
    """Converted: no run has written it, and there is nothing to go on from but weights."""
    skipped: Sequence[tuple[Path, str]] = ()
    """Newer ones that are damaged, and what is wrong with each."""


class CheckpointWriting:
    """A checkpoint of a trained rollout while it is being written: built when it is begun, `complete` when it is there.

    Args:
        folder: holds all checkpoints of the run.
        rollout_id: the last rollout that was trained on. The stop rule is kept as it is now.
        data: the data source's state, with the groups that are under way.
        settings: what to compare with on resume.
        in_background: training may go on before it is complete.
        checksums: of its files are kept, too: they are read once more.
    Raises: OSError when the disk is full; no partial checkpoint stays.
    """

    def __init__(
        self,
        folder: Path,
        rollout_id: int,
        trainer: Trainer,
        data: Mapping[str, Any],
        stop: StopRule,
        settings: Mapping[str, Any],
        *,
        in_background: bool,
        checksums: bool = True,
    ) -> None:
        self.rollout_id = rollout_id
        self._in_background, self._checksums = in_background, checksums
        self._sums: Future[dict[str, Any]] | None = None
        self._folder, self._trainer = folder, trainer
        self._final = folder / f"rollout_{rollout_id:06d}"
        # A name of its own: ranks of a killed run may still be writing for a moment.
        self._partial = folder / f".partial_{self._final.name}_{uuid.uuid4().hex[:8]}"
        self._is_written = not in_background
        self._state = {
            "format": _FORMAT,
            "rollout_id": rollout_id,
            "data_source": data,
            "stop": stop.state(),
            "settings": settings,
        }
        self._partial.mkdir(parents=True)
        with self._removed_on_error():
            if in_background:
                trainer.begin_save(self._partial / "trainer")
            else:
                trainer.save(self._partial / "trainer")

    def complete(self, *, wait: bool) -> Path | None:
        """Give it its name, once the trainer's part is whole: its final path, or None if that is not yet so.

        Args: wait: until it is.
        Raises: OSError when the disk is full; TrainingError if the ranks cannot write. No partial checkpoint stays.
        """
        with self._removed_on_error():
            if not self._is_written and not self._trainer.end_save(wait):
                return None
            self._is_written = True
            if (files := self._files(wait=wait)) is None:
                return None
            _write_json(self._partial / "state.json", _sealed(self._state | {"files": files}))
            if self._final.exists():  # the same rollout, trained again after a resume from an earlier one
                old = self._folder / f".replaced_{self._final.name}"
                shutil.rmtree(old, ignore_errors=True)
                self._final.rename(old)
                self._partial.rename(self._final)
                shutil.rmtree(old)
            else:
                self._partial.rename(self._final)
            _flush_folder(self._folder)
        return self._final

    def _files(self, *, wait: bool) -> dict[str, Any] | None:
        """The files that were written, by size and checksum; None if they are still read."""
        if not self._in_background or sum(p.stat().st_size for p in self._partial.rglob("*")) < _SOON_BYTES:
            return sums_of(self._partial, checksums=self._checksums)
        if self._sums is None:
            reader = ThreadPoolExecutor(1, "checksums")
            self._sums = reader.submit(sums_of, self._partial, checksums=self._checksums)
            reader.shutdown(wait=False)
        return self._sums.result() if wait or self._sums.done() else None

    @contextmanager
    def _removed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            free = shutil.disk_usage(self._folder).free
            shutil.rmtree(self._partial, ignore_errors=True)
            if isinstance(error, VimeError) and free < _FULL_BYTES:  # the writers' own words are of positions and ranks
                what = f"checkpoint of rollout {self.rollout_id}: the disk is full"
                raise OSError(errno.ENOSPC, what, str(self._folder)) from error
            if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                what = f"checkpoint of rollout {self.rollout_id}: {error.strerror}"
                raise OSError(error.errno, what, str(self._folder)) from error
            raise


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
    if isinstance(state, dict) and "format" in state and state["format"] != _FORMAT:
        raise ConfigError(f"{flag}{path}: checkpoint format {state['format']!r}, this vime reads {_FORMAT}")
    if damage := _damage(state):
        return f"in state.json {damage}"
    if state.get("seal", seal := _seal(state)) != seal:
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


def write_weights_file(folder: Path, settings: Mapping[str, Any]) -> None:
    """Mark a folder with the weights in `trainer/`. Args: settings: as vime.loop.compatibility.weights_to_keep."""
    files = sums_of(folder, checksums=True)
    _write_json(folder / WEIGHTS_FILE, {"format": _FORMAT, "settings": settings, "files": files})


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


def _sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with a checksum of itself."""
    return {**state, "seal": _seal(state)}


def _seal(state: Mapping[str, Any]) -> int:
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


def write_metrics(checkpoint: Path, metrics: Mapping[str, float]) -> None:
    """Keep the metrics of the step that a checkpoint was made in, evaluation included, beside it."""
    partial = checkpoint / ".metrics.json.partial"
    try:
        _write_json(partial, dict(metrics))
        partial.replace(checkpoint / "metrics.json")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(checkpoint / "metrics.json")) from error
    finally:
        partial.unlink(missing_ok=True)


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


def _write_json(path: Path, value: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """A rename survives a power failure once its folder is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
