"""A checkpoint while it is written: under a temporary name, and renamed when all of it is there (see checkpoint.py)."""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vime.errors import VimeError
from vime.loop.cadence import StopRule
from vime.loop.checkpoint import FORMAT, WEIGHTS_FILE, seal_of
from vime.loop.file_sums import sums_of
from vime.protocols import Trainer

NO_METRICS: Mapping[str, float] = MappingProxyType({})
_FULL_BYTES = 16 << 20  # less space than this is none
_SOON_BYTES = 16 << 20  # are read in hundredths of a second: no thread is needed


class CheckpointWriting:
    """A checkpoint of a trained rollout while it is being written: built when it is begun, `complete` when it is there.

    Args:
        folder: holds all checkpoints of the run.
        rollout_id: the last rollout that was trained on. The stop rule is kept as it is now.
        data: the data source's state, with the groups that are under way.
        settings: what to compare with on resume.
        metrics: of the step so far.
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
        metrics: Mapping[str, float] = NO_METRICS,
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
            "format": FORMAT,
            "rollout_id": rollout_id,
            "data_source": data,
            "stop": stop.state(),
            "settings": settings,
            "metrics": dict(metrics),
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


def write_weights_file(folder: Path, settings: Mapping[str, Any]) -> None:
    """Mark a folder with the weights in `trainer/`. Args: settings: as vime.loop.compatibility.weights_to_keep."""
    files = sums_of(folder, checksums=True)
    _write_json(folder / WEIGHTS_FILE, {"format": FORMAT, "settings": settings, "files": files})


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


def _sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with a checksum of itself."""
    return {**state, "seal": seal_of(state)}


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
