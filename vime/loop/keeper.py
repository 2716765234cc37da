"""What a loop does with checkpoints: save, export, note how good each is, and remove those that need not stay."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from vime.config.validate_checkpoint import parse_best
from vime.data.journaled import JournaledSource
from vime.errors import ConfigError, TrainingError, VimeError
from vime.loop.cadence import StopRule
from vime.loop.checkpoint import find_checkpoints, read_metrics, rollout_of
from vime.loop.checkpoint_writing import NO_METRICS, CheckpointWriting, write_metrics
from vime.loop.source_state import state_of
from vime.loop.staleness import version_after
from vime.protocols import DataSource, Trainer
from vime.types import Group


class CheckpointKeeper:
    """One per run. Order of calls in a step: `save` and `export_hf` when due, then `settle`; at the end `finish`.

    `trained` comes before `save`.

    As a context manager it finishes after errors that left the trainer able to, too.

    Args:
        trainer, source, stop: what a checkpoint is of.
        folder: where checkpoints go; None saves none.
        settings: kept with each, see vime/loop/compatibility.py.
        hf_path: where HF exports go, {rollout_id} replaced; None exports none.
        keep_last: newest checkpoints that stay; None keeps all.
        keep_best: "METRIC", "METRIC:max" or "METRIC:min"; the best by it stays, too.
        journaled: the source, where it has a journal: it knows which groups are out, whenever it is asked.
        checksums: keep those of a checkpoint's files with it.
        in_background: go on with the run while a checkpoint is written; `settle` and the next `save` complete it.
    Raises: DataError if the source's state is nothing that a checkpoint can keep.
    """

    def __init__(
        self,
        trainer: Trainer,
        source: DataSource,
        stop: StopRule,
        *,
        folder: Path | None,
        settings: Mapping[str, Any],
        hf_path: str | None = None,
        keep_last: int | None = None,
        keep_best: str | None = None,
        in_background: bool = False,
        checksums: bool = True,
        journaled: JournaledSource | None = None,
    ) -> None:
        self._trainer, self._source, self._stop = trainer, source, stop
        self._journaled = journaled
        self._folder, self._settings, self._hf_path = folder, settings, hf_path
        self._keep_last = keep_last
        self._best = parse_best(keep_best) if keep_best is not None else None
        self._in_background, self._checksums = in_background, checksums
        self._writing: CheckpointWriting | None = None
        self._fresh: Path | None = None  # complete, but its step has not ended
        self._metrics: Mapping[str, float] | None = None  # of the step that the checkpoint being written is of
        self._written: Mapping[str, Any] = {}  # of the checkpoint being written
        if folder is not None:
            state_of(source)  # what cannot be kept is said now, not after the first step

    def trained(self, rollout_id: int, groups: Sequence[Group]) -> None:
        """The trainer has learnt from these groups: the next `save` is of them, too."""
        if self._journaled is not None:
            self._journaled.trained(rollout_id, groups)

    def save(self, rollout_id: int, metrics: Mapping[str, float] = NO_METRICS) -> None:
        """Write a checkpoint, or begin to; one that is still being written is waited for.

        Args: metrics: of the step so far; a run that is killed before it has written them leaves them to its resume.
        Raises: OSError when the disk is full; no partial checkpoint stays.
        """
        assert self._folder is not None, "the cadence saves only where --save names a folder"
        self.finish()
        remove_leftovers(self._folder)
        self._metrics = None
        self._written = state_of(self._source)
        self._writing = CheckpointWriting(
            self._folder,
            rollout_id,
            self._trainer,
            self._written,
            self._stop,
            self._settings,
            metrics=metrics,
            in_background=self._in_background,
            checksums=self._checksums,
        )
        if not self._in_background:
            self._complete(wait=True)

    def export_hf(self, rollout_id: int) -> None:
        """Write an HF checkpoint, whole or not at all. Raises: OSError when the disk is full."""
        assert self._hf_path is not None, "the cadence exports only where --save-hf names a folder"
        export_hf(self._trainer, Path(self._hf_path.format(rollout_id=rollout_id)))

    def settle(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """End the step: note its metrics beside its checkpoint, and remove those that need not stay.

        Raises: TrainingError if the metric of `keep_best` is not among a step's that should have it.
        """
        if self._writing is None and self._fresh is None:
            return
        if self._metrics is None:
            if self._best is not None:
                _check_metric(self._best[0], metrics)
            self._metrics = dict(metrics)
        self._complete(wait=False)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written. Raises: as `save` does."""
        self._complete(wait=True)

    def _complete(self, *, wait: bool) -> None:
        if self._writing is not None:
            try:
                self._fresh = self._writing.complete(wait=wait)
            except BaseException:
                self._writing = None
                raise
            if self._fresh is None:
                return
            if self._journaled is not None:
                rollout_id = self._writing.rollout_id
                self._journaled.saved(rollout_id, version_after(rollout_id), self._written)
            self._writing = None
        if self._fresh is None or self._metrics is None or self._folder is None:
            return
        fresh, self._fresh = self._fresh, None
        write_metrics(fresh, self._metrics)
        if self._keep_last is not None:
            prune(self._folder, self._keep_last, self._best)

    def __enter__(self) -> CheckpointKeeper:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """After an error outside the trainer the checkpoint is worth waiting for; after ctrl-C nobody waits."""
        if self._writing is None or isinstance(error, TrainingError) or not isinstance(error, Exception | None):
            return
        rollout_id = self._writing.rollout_id
        try:
            self.finish()
        except (VimeError, OSError) as second:
            if error is None:
                raise
            error.add_note(f"and the checkpoint of rollout {rollout_id} could not be completed: {second}")


def best_checkpoint(folder: Path, metric: str, *, more_is_better: bool) -> Path | None:
    """The complete checkpoint with the best value, the newer of equals; None when none has a finite one."""
    sign = 1 if more_is_better else -1
    values = [(sign * _value(path, metric), rollout_of(path), path) for path in find_checkpoints(folder)]
    scored = [entry for entry in values if math.isfinite(entry[0])]
    return max(scored)[2] if scored else None


def prune(folder: Path, keep_last: int, best: tuple[str, bool] | None) -> None:
    """Remove all complete checkpoints but the newest `keep_last` (at least one) and the best."""
    keep = set(find_checkpoints(folder)[-max(keep_last, 1) :])
    if best is not None and (path := best_checkpoint(folder, best[0], more_is_better=best[1])) is not None:
        keep.add(path)
    for path in find_checkpoints(folder):
        if path not in keep:
            # Under another name first: a folder that is half removed must not look like a checkpoint.
            path.rename(removed := path.with_name(f".removed_{path.name}"))
            _remove(removed)


def remove_leftovers(folder: Path) -> None:
    """Remove what a run that was killed while it saved or removed has left."""
    for pattern in (".partial_rollout_*", ".removed_rollout_*", ".replaced_rollout_*"):
        for path in folder.glob(pattern):
            _remove(path)


def _remove(path: Path) -> None:
    """A checkpoint that was moved elsewhere and linked to: the link alone goes."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def export_hf(trainer: Trainer, path: Path) -> None:
    """Write an HF checkpoint beside `path` and rename it when complete; an earlier export there is replaced.

    Raises: ConfigError if `path` is a folder of other things; OSError when the disk is full.
    """
    if path.is_dir() and any(path.iterdir()) and not (path / "config.json").is_file():
        raise ConfigError(f"--save-hf {path} holds files but no HF checkpoint, and is not replaced; choose another")
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        trainer.export_hf(partial)
        if path.exists():
            shutil.rmtree(path)
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _check_metric(metric: str, metrics: Mapping[str, float]) -> None:
    """Evaluation is not due in each step, so its metrics may lack; any other must be there."""
    is_due = not metric.startswith("eval/") or any(name.startswith("eval/") for name in metrics)
    if is_due and metric not in metrics:
        raise TrainingError(f"--keep-best-checkpoint {metric} is not among the metrics: {', '.join(sorted(metrics))}")


def _value(checkpoint: Path, metric: str) -> float:
    value = read_metrics(checkpoint).get(metric)
    return math.nan if value is None else float(value)
