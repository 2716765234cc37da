"""Where metrics go: a JSONL file always, TensorBoard by flag."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Protocol

from vime.observability.metrics import check_names
from vime.types import Metrics

_log = logging.getLogger(__name__)


class MetricWriter(Protocol):
    """Takes the metrics of each step, once per step and in order; `close` when the run ends."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Record one step's metrics. Raises: UnknownMetric on a name without a definition."""

    def close(self) -> None:
        """Flush and release."""


class JsonlWriter:
    """One JSON object a line: step, time (Unix seconds), then the metrics. Appends, so a resumed run goes on.

    All lines are whole: one that a crash has cut is removed by the next writer, one that a full disk has cut at once.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b", buffering=0)  # what a full disk has no room for stays in no buffer
        if (torn := _torn_bytes(self._file)) > 0:
            self._file.truncate(self._file.seek(0, os.SEEK_END) - torn)

    def write(self, step: int, metrics: Metrics) -> None:
        """Append one line. NaN and infinity, which JSON lacks, become null with a warning.

        Raises: UnknownMetric; OSError (a full disk).
        """
        check_names(metrics)
        values = {name: float(v) for name, v in metrics.items()}
        if bad := [name for name, v in values.items() if not math.isfinite(v)]:
            _log.warning("step %d: not finite, written as null: %s", step, ", ".join(f"{n}={values[n]}" for n in bad))
        row: dict[str, float | None] = {"step": step, "time": self._clock()}
        row |= {name: v if math.isfinite(v) else None for name, v in values.items()}
        write_whole(self._file, self._file.seek(0, os.SEEK_END), (json.dumps(row, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def write_whole(file: FileIO, place: int, data: bytes, *, tail: bytes = b"") -> None:
    """Write at a place of an unbuffered file, with `tail` behind it; what was there is replaced.

    Raises: OSError (a full disk), with nothing but the tail written.
    """
    file.seek(place)
    rest = memoryview(data + tail)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        file.truncate(place)
        file.seek(place)
        file.write(tail)
        raise OSError(error.errno, error.strerror, str(file.name)) from error


class TensorBoardWriter:
    """TensorBoard scalars in a folder of event files. Imports torch when made."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder))

    def write(self, step: int, metrics: Metrics) -> None:
        """Record every metric as a scalar at this step. Raises: UnknownMetric."""
        check_names(metrics)
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is buffered and close."""
        self._writer.close()


class MultiWriter:
    """Writes to several writers."""

    def __init__(self, *writers: MetricWriter) -> None:
        self._writers = writers

    def write(self, step: int, metrics: Metrics) -> None:
        """Pass on to every writer."""
        for writer in self._writers:
            writer.write(step, metrics)

    def close(self) -> None:
        """Close every writer."""
        for writer in self._writers:
            writer.close()


def _torn_bytes(file: FileIO) -> int:
    """Length of a last line that has no end."""
    end = file.seek(0, os.SEEK_END)
    length = 0
    while length < end:
        step = min(1 << 16, end - length)
        file.seek(end - length - step)
        found = file.read(step).rfind(b"\n")
        if found >= 0:
            return length + step - 1 - found
        length += step
    return length
