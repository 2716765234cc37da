"""What a step keeps of what it is told."""

import json
from pathlib import Path

import numpy as np

from tests.loop.world import recording, rows_of


def test_numbers_of_other_libraries_are_kept_as_plain_ones(tmp_path: Path) -> None:
    with recording(tmp_path, 1) as recorder, recorder.step(0) as step:
        step.add({"custom/mine": np.float32(0.5), "train/loss": 1})
        assert json.dumps(step.metrics) == '{"custom/mine": 0.5, "train/loss": 1.0}', "a checkpoint keeps them as JSON"
    assert rows_of(tmp_path)[0]["custom/mine"] == 0.5
