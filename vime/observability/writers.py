"""Where metrics go: a JSONL file always, TensorBoard by flag."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol

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
    """One JSON object a line: step, time (Unix seconds), then the metrics. Appends, so a resumed run goes on."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = open(path, "a", encoding="utf-8")
        if _ends_torn(path):  # a crash cut the last line; the next one must not join it
            self._file.write("\n")

    def write(self, step: int, metrics: Metrics) -> None:
        """Append one line and flush it. NaN and infinity, which JSON lacks, become null with a warning.

        Raises: UnknownMetric; OSError (a full disk).
        """
        check_names(metrics)
        values = {name: float(v) for name, v in metrics.items()}
        if bad := [name for name, v in values.items() if not math.isfinite(v)]:
            _log.warning("step %d: not finite, written as null: %s", step, ", ".join(f"{n}={values[n]}" for n in bad))
        row: dict[str, float | None] = {"step": step, "time": self._clock()}
        row |= {name: v if math.isfinite(v) else None for name, v in values.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


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


def _ends_torn(path: Path) -> bool:
    with open(path, "rb") as file:
        if not file.seek(0, 2):
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"
