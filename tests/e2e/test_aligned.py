"""--aligned on a CPU in a run: the engine's log-probs are the trainer's, after weight syncs, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_three_steps_without_any_difference(
    run_train: Callable[..., str], grpo_flags: list[str], tmp_path: Path
) -> None:
    run_train(*grpo_flags, "--run-dir", str(tmp_path), "--num-rollout", "3", "--skip-eval-before-train", "--aligned")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] >= 0]
    assert [row["train/policy_version"] for row in rows] == [1, 2, 3]
    assert [row["train/train_rollout_logprob_abs_diff_max"] for row in rows] == [0, 0, 0]
    assert all(row["weight_sync/probe_abs_diff_max"] == 0 for row in rows)
