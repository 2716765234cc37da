"""Half a pipeline: the trainer alone on a run's rollouts, with a stop in between; generation alone."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vime.loop.checkpoint import find_checkpoints
from vime.loop.replay import ReplayedRollouts

pytestmark = pytest.mark.engine

EXACT = ("train/loss", "train/pg_loss", "train/kl_loss", "train/grad_norm", "train/lr-pg_0", "train/step")


def steps_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


def test_a_replay_with_a_stop_in_between_has_the_losses_of_the_run_bit_by_bit(
    finished: tuple[Path, str],
    run_train: Callable[..., str],
    start_train: Callable[..., subprocess.Popen[str]],
    grpo_flags: list[str],
    tmp_path: Path,
) -> None:
    saved = tmp_path / "checkpoints"
    flags = [
        *grpo_flags,
        *("--run-dir", str(tmp_path), "--load-debug-rollout-data", str(finished[0]), "--debug-train-only"),
        *("--load", str(saved), "--save", str(saved), "--save-interval", "1"),
        *("--keep-last-checkpoints", "1", "--keep-best-checkpoint", "train/loss:min"),
        *("--save-hf", str(tmp_path / "hf" / "{rollout_id}"), "--save-hf-interval", "2", "--lr-decay-iters", "6"),
    ]
    run_train(*flags, "--num-rollout", "2")
    output = run_train(*flags, "--num-rollout", "3")
    assert "next is rollout 2" in output and "--num-rollout 2 -> 3" in output
    want, got = steps_of(finished[0]), steps_of(tmp_path)
    for name in EXACT:
        assert [row[name] for row in got] == [row[name] for row in want], name
    assert [row["train/step"] for row in got] == [2, 4, 6]
    assert all(row["train/pg_loss"] != 0 and row["train/grad_norm"] > 0 for row in want)
    losses = [row["train/loss"] for row in got]
    best = losses.index(min(losses))
    assert [p.name for p in find_checkpoints(saved)] == [f"rollout_{r:06d}" for r in sorted({best, 2})]
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == ["1", "2"]

    process = start_train(*flags, "--num-rollout", "4", "--bf16")
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 2 and "dtype was float32 and is bfloat16" in output
    assert "starting Ray" not in output


def test_generation_alone_makes_the_rollout_that_the_run_made(
    finished: tuple[Path, str], run_train: Callable[..., str], grpo_flags: list[str], tmp_path: Path
) -> None:
    pattern = str(tmp_path / "kept" / "{rollout_id}.parquet")
    flags = [*grpo_flags, "--num-rollout", "1", "--debug-rollout-only", "--save-debug-rollout-data", pattern]
    output = run_train(*flags, "--run-dir", str(tmp_path))
    assert "starting the engines" in output
    (got,) = [ReplayedRollouts(pattern, [0]).generate(0).groups]
    want = ReplayedRollouts(str(finished[0]), [0]).generate(0).groups
    assert [s.tokens for g in got for s in g.samples] == [s.tokens for g in want for s in g.samples]
    assert [s.reward for g in got for s in g.samples] == [s.reward for g in want for s in g.samples]
    assert len({s.reward for g in got for s in g.samples}) > 4
