"""--deterministic with the real engine and trainer: runs repeat themselves, also when they are killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vime.data.accounting import account_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_ROLLOUT = 5


def flags(grpo_flags: list[str], folder: Path, run: str) -> list[str]:
    save = str(folder / "ckpt")
    length = [*("--num-rollout", str(NUM_ROLLOUT), "--eval-interval", "3"), "--deterministic"]
    return [
        *(*grpo_flags, *length, "--save", save, "--load", save, "--save-interval", "2"),
        *("--run-dir", str(folder / run), "--lr-decay-iters", "20"),
    ]


def losses(*folders: Path) -> dict[int, dict[str, Any]]:
    """What follows from samples and weights, by step; of a step that was made twice the later one counts."""
    rows: dict[int, dict[str, Any]] = {}
    for folder in folders:
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            if "train/loss" not in row:
                continue  # the evaluation before a run's first step
            rows[row["step"]] = {
                name: value
                for name, value in row.items()
                if name in ("train/loss", "train/grad_norm", "rollout/raw_reward", "train/kl_loss", "eval/heldout")
                or name.startswith("train/train_rollout_logprob_abs_diff")
            }
    return {step: rows[step] for step in range(NUM_ROLLOUT)}


def test_two_runs_and_one_that_was_killed_give_the_same_losses(
    tmp_path: Path,
    grpo_flags: list[str],
    run_train: Callable[..., str],
    start_train: Callable[..., subprocess.Popen[str]],
) -> None:
    run_train(*flags(grpo_flags, tmp_path / "a", "run"))
    run_train(*flags(grpo_flags, tmp_path / "b", "run"))
    straight = losses(tmp_path / "a" / "run")
    assert losses(tmp_path / "b" / "run") == straight
    assert len({row["train/loss"] for row in straight.values()}) == NUM_ROLLOUT

    killed = start_train(*flags(grpo_flags, tmp_path / "c", "first"))
    metrics = tmp_path / "c" / "first" / "metrics.jsonl"
    while killed.poll() is None and not (metrics.is_file() and len(metrics.read_text().splitlines()) >= 4):
        time.sleep(0.05)  # the evaluation before, and three steps: the third is not saved
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    said = run_train(*flags(grpo_flags, tmp_path / "c", "second"))
    assert "next is rollout 2" in said
    assert losses(tmp_path / "c" / "first", tmp_path / "c" / "second") == straight
    assert account_of(tmp_path / "c" / "ckpt" / "journal.sqlite").is_exact
