"""`train_async.py --fully-async` as users run it: every prompt once, ages within the bound, all that a run leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest

from vime.observability.metrics import check_names

pytestmark = pytest.mark.engine

NUM_ROLLOUT, BATCH = 4, 8


@pytest.fixture(scope="module")
def done(run_train: Callable[..., str], grpo_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fully_async")
    run_train(
        *grpo_flags,
        *("--fully-async", "--max-staleness", "1", "--run-dir", str(folder), "--num-rollout", str(NUM_ROLLOUT)),
        *("--skip-eval-before-train", "--eval-interval", "2", "--trace", "--max-groups-in-flight", "4"),
        *("--save", str(folder / "checkpoints"), "--save-interval", "2"),
        program="train_async.py",
    )
    return folder


def steps_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


def rollout(folder: Path, rollout_id: int) -> Any:
    return pandas.read_parquet(folder / "rollouts" / f"rollout_{rollout_id:06d}.parquet")


def test_every_prompt_is_trained_on_once_and_none_is_older_than_allowed(done: Path) -> None:
    frames = [rollout(done, i) for i in range(NUM_ROLLOUT)]
    prompts = [prompt for frame in frames for prompt in frame["prompt"].unique()]
    assert len(prompts) == len(set(prompts)) == NUM_ROLLOUT * BATCH
    for rollout_id, frame in enumerate(frames):
        versions = {span["version"] for spans in frame["weight_versions"] for span in spans}
        assert rollout_id <= min(versions) and max(versions) <= rollout_id + 1
    steps = steps_of(done)
    assert [row["staleness/max"] <= 1 for row in steps] == [True] * NUM_ROLLOUT
    assert sum(row["stream/dropped_stale_groups"] for row in steps) == 0
    assert all(row["weight_sync/probe_abs_diff_max"] < 1e-4 for row in steps)
    assert steps[0]["train/train_rollout_logprob_abs_diff"] < 1e-5


def test_times_add_up_and_evaluation_and_trace_are_there(done: Path) -> None:
    steps = steps_of(done)
    stages = ("rollout_wait", "make_batch", "train", "save_model", "rollout_pause", "update_weights", "eval", "other")
    for row in steps:
        check_names(set(row) - {"step", "time"})
        assert sum(row.get(f"perf/{s}_time", 0.0) for s in stages) == pytest.approx(row["perf/step_time"], abs=1e-6)
    assert ["eval/heldout" in row for row in steps] == [False, True, False, True]
    events = json.loads((done / "trace_000000.json").read_text())
    assert any(e["ph"] == "C" and set(e["args"]) == {"generating", "scoring", "finished"} for e in events)
    assert {e["name"] for e in events if e["ph"] == "X"} >= {"version 1", "version 2", "queued", "generate", "reward"}


@pytest.mark.slow
def test_a_resume_from_the_middle_goes_on_with_the_prompts_that_were_not_trained_on(
    done: Path, run_train: Callable[..., str], grpo_flags: list[str], tmp_path: Path
) -> None:
    flags = ("--load", str(done / "checkpoints"), "--ckpt-step", "1", "--num-rollout", str(NUM_ROLLOUT))
    run_train(*grpo_flags, "--fully-async", "--run-dir", str(tmp_path), *flags, program="train_async.py")
    before = {prompt for i in (0, 1) for prompt in rollout(done, i)["prompt"]}
    after = [prompt for i in (2, 3) for prompt in rollout(tmp_path, i)["prompt"].unique()]
    assert len(set(after)) == len(after) == 2 * BATCH and not before & set(after)
    drawn = {prompt for i in range(NUM_ROLLOUT) for prompt in rollout(done, i)["prompt"]}
    assert before | set(after) == drawn, "the same prompts as in the run that was not interrupted"
