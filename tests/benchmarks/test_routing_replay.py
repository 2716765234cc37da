"""The benchmark of routing replay runs where there is no device, and says what a row costs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_tiny_model_is_measured_on_the_cpu(tmp_path: Path) -> None:
    sizes = ["--samples", "4", "--length", "24", "--prompt", "4", "--micro-batch-size", "2", "--steps", "1"]
    command = [
        sys.executable,
        "benchmarks/routing_replay.py",
        "--tiny",
        *sizes,
        "--bar",
        "1e9",
        "--out",
        tmp_path / "o",
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "o").read_text())
    assert result["bytes_per_token"] == 2 * 2  # layers x experts a token, one byte each
    assert result["differs"] < 0.1 and result["ratio"] > 0
