"""The quickstart learns, for three of three seeds, by each of the three loops; a control without updates does not.

Minutes each.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.engine]

ROOT = Path(__file__).resolve().parents[2]


def quickstart(folder: Path, *flags: str) -> tuple[int, str, dict[str, Any], list[dict[str, Any]]]:
    """Exit code, output, summary, and the metrics of the GRPO run."""
    command = [sys.executable, "examples/quickstart/run.py", "--out", str(folder), *flags]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert (folder / "summary.json").exists(), done.stdout
    rows = [json.loads(line) for line in (folder / "grpo" / "metrics.jsonl").read_text().splitlines()]
    return done.returncode, done.stdout, json.loads((folder / "summary.json").read_text()), rows


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("order", ["in-turns", "one-step-ahead", "fully-async"])
def test_the_quickstart_learns(seed: int, order: str, tmp_path: Path) -> None:
    code, output, summary, rows = quickstart(
        tmp_path, "--seed", str(seed), *([] if order == "in-turns" else [f"--{order}"])
    )
    assert code == 0, output
    assert summary["accuracy_before"] <= 0.5
    assert summary["accuracy_after"] >= 0.75
    assert summary["accuracy_after"] - summary["accuracy_before"] >= 0.25
    assert summary["peak_rss_gib"] < 12
    steps = [row for row in rows if "perf/step_time" in row]
    ages = [row["staleness/max"] for row in steps]
    if order == "fully-async":
        assert ages[0] == 0 and max(ages) <= 2
    else:
        assert ages == [0] + [order == "one-step-ahead"] * (len(steps) - 1)
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in steps if not row["staleness/max"]) <= 1e-5


def test_with_learning_rate_zero_accuracy_does_not_rise_and_the_quickstart_says_so(tmp_path: Path) -> None:
    code, output, summary, rows = quickstart(tmp_path, "--lr", "0", "--num-rollout", "20")
    assert code == 1
    assert "the model did not learn as it should" in output
    assert abs(summary["accuracy_after"] - summary["accuracy_before"]) <= 0.01
    rewards = [row["rollout/raw_reward"] for row in rows if "perf/step_time" in row]
    assert abs(sum(rewards[10:]) - sum(rewards[:10])) / 10 < 0.05
