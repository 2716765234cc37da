import errno
import json
import logging
import math
import subprocess
import sys

import pytest

from vime.observability.metrics import UnknownMetric
from vime.observability.writers import JsonlWriter, MultiWriter, TensorBoardWriter


def read(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_one_flushed_line_a_step_with_its_time(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    writer = JsonlWriter(path, clock=lambda: 12.5)
    writer.write(0, {"train/loss": 1.5})
    assert read(path) == [{"step": 0, "time": 12.5, "train/loss": 1.5}], "readable while the run goes on"
    writer.write(1, {"train/loss": 1})
    writer.close()
    again = JsonlWriter(path)
    again.write(2, {})
    again.close()
    assert [row["step"] for row in read(path)] == [0, 1, 2]


def test_nan_and_infinity_are_null_with_a_warning(tmp_path, caplog):
    writer = JsonlWriter(tmp_path / "m.jsonl")
    with caplog.at_level(logging.WARNING):
        writer.write(7, {"train/loss": math.nan, "train/grad_norm": math.inf, "train/pg_loss": 0.0})
    writer.close()
    (row,) = read(tmp_path / "m.jsonl")
    assert (row["train/loss"], row["train/grad_norm"], row["train/pg_loss"]) == (None, None, 0.0)
    assert "step 7" in caplog.text and "train/loss=nan" in caplog.text and "train/pg_loss" not in caplog.text


@pytest.mark.parametrize("torn", ['{"step": 1, "tra', "x" * 200_000])
@pytest.mark.parametrize("before", ['{"step": 0}\n', ""])
def test_a_line_torn_by_a_crash_is_removed(tmp_path, torn, before):
    path = tmp_path / "m.jsonl"
    path.write_text(before + torn, "utf-8")
    writer = JsonlWriter(path)
    writer.write(1, {})
    writer.close()
    assert [row["step"] for row in read(path)] == [0, 1][not before :]


FILLS = """
import json, resource, sys
from pathlib import Path
from vime.observability.trace_file import TraceFile
from vime.observability.writers import JsonlWriter

folder = Path(sys.argv[1])
writer, trace = JsonlWriter(folder / "m.jsonl"), TraceFile(folder / "t.json", 1 << 30)
writer.write(0, {"train/loss": 1.0})
trace.append([{"name": "a"}])
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
for write in (lambda: writer.write(1, {"train/loss": 1.0}), lambda: trace.append([{"name": "b" * 200}])):
    try:
        write()
    except OSError as error:
        print(error.errno, flush=True)
writer.close()
trace.close()
"""


def test_a_file_that_cannot_grow_keeps_whole_lines_and_events_alone(tmp_path):
    command = [sys.executable, "-c", FILLS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.split() == [str(errno.EFBIG)] * 2, done.stderr
    assert [row["step"] for row in read(tmp_path / "m.jsonl")] == [0]
    assert json.loads((tmp_path / "t.json").read_text()) == [{"name": "a"}]


def test_unknown_names_are_refused_and_nothing_is_written(tmp_path):
    writer = JsonlWriter(tmp_path / "m.jsonl")
    with pytest.raises(UnknownMetric):
        writer.write(0, {"train/losss": 1.0})
    writer.close()
    assert (tmp_path / "m.jsonl").read_text() == ""


def test_tensorboard_events_can_be_read_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = MultiWriter(JsonlWriter(tmp_path / "m.jsonl"), TensorBoardWriter(tmp_path / "tb"))
    writer.write(3, {"train/loss": 0.25})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(3, 0.25)]
    assert read(tmp_path / "m.jsonl")[0]["step"] == 3
