"""`train_async.py` as users run it: the prompts of `train.py`, samples of one version each, none skipped at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest

from vime.data.journaled import KEY
from vime.loop.checkpoint import open_checkpoint

pytestmark = pytest.mark.engine


def steps_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


def rollout(folder: Path, rollout_id: int) -> Any:
    return pandas.read_parquet(folder / "rollouts" / f"rollout_{rollout_id:06d}.parquet")


@pytest.fixture(scope="module")
def stopped(
    run_train: Callable[..., str], grpo_flags: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """A run that its rule ends after three rollouts, while the fourth, which would never end, is under way."""
    folder = tmp_path_factory.mktemp("stopped")
    output = run_train(
        *grpo_flags,
        *("--run-dir", str(folder), "--num-rollout", "9", "--skip-eval-before-train", "--trace"),
        *("--stop-metric", "train/step", "--stop-above", "6", "--stop-window", "1"),
        *("--custom-rm-path", "e2e_rewards.share_of_even_tokens_in_three_rollouts"),
        *("--save", str(folder / "checkpoints"), "--save-interval", "2"),
        program="train_async.py",
    )
    return folder, output


def test_the_prompts_are_those_of_train_py_and_each_rollout_is_one_version_behind(
    stopped: tuple[Path, str], finished: tuple[Path, str]
) -> None:
    folder, output = stopped
    steps = steps_of(folder)
    assert [row["step"] for row in steps] == [0, 1, 2] and "rollout 3/9" in output
    assert "ended by --stop-metric after rollout 3 of 9: train/step was 6 on average over 1 rollouts" in output
    for rollout_id, version in enumerate((1, 1, 2)):
        ahead, in_turns = rollout(folder, rollout_id), rollout(finished[0], rollout_id)
        assert ahead["prompt"].tolist() == in_turns["prompt"].tolist()
        assert {span["version"] for spans in ahead["weight_versions"] for span in spans} == {version}
    assert rollout(folder, 0)["response"].tolist() == rollout(finished[0], 0)["response"].tolist()
    assert [row["train/policy_version"] for row in steps] == [1, 1, 2]
    assert [row["staleness/max"] for row in steps] == [0, 1, 1]
    assert all(row["weight_sync/probe_abs_diff_max"] < 1e-4 for row in steps)
    stages = ("rollout_wait", "make_batch", "train", "save_model", "update_weights", "eval", "other")
    for row in steps:
        assert sum(row.get(f"perf/{s}_time", 0.0) for s in stages) == pytest.approx(row["perf/step_time"], abs=1e-6)


def test_a_rollout_under_way_at_the_end_is_called_off_and_its_prompts_are_the_next(stopped: tuple[Path, str]) -> None:
    folder, _ = stopped
    assert "eval/heldout" in steps_of(folder)[-1], "engines are free for the last evaluation"
    for rollout_id in (1, 2):
        state = open_checkpoint(folder / "checkpoints", rollout_id).data_source
        (drawn,), out = state["drawn"], state[KEY]["out"]
        assert drawn - len(out) == 8 * (rollout_id + 1), "up to 8 more were taken when it was written"


def test_the_trace_shows_generation_beside_training(stopped: tuple[Path, str]) -> None:
    spans = [e for e in json.loads((stopped[0] / "trace_000000.json").read_text()) if e["ph"] == "X"]
    rollouts = {e["args"]["rollout_id"]: e for e in spans if e["name"] == "rollout" and "rollout_id" in e["args"]}
    trainings = sorted((e for e in spans if e["name"] == "train"), key=lambda e: float(e["ts"]))
    assert sorted(rollouts) == [0, 1, 2] and len(trainings) == 3
    for rollout_id, training in enumerate(trainings[:-1]):
        assert rollouts[rollout_id + 1]["ts"] < training["ts"], "it began before the training of the one before"
    assert len([e for e in spans if e["name"].startswith("sample ")]) >= 3 * 32


@pytest.mark.slow
def test_a_run_stopped_one_step_ahead_goes_on_in_turns_with_the_next_prompts(
    stopped: tuple[Path, str],
    finished: tuple[Path, str],
    run_train: Callable[..., str],
    grpo_flags: list[str],
    tmp_path: Path,
) -> None:
    flags = ("--load", str(stopped[0] / "checkpoints"), "--ckpt-step", "1", "--num-rollout", "3")
    output = run_train(*grpo_flags, "--run-dir", str(tmp_path), "--skip-eval-before-train", *flags)
    assert "next is rollout 2" in output
    assert rollout(tmp_path, 2)["prompt"].tolist() == rollout(finished[0], 2)["prompt"].tolist()
    (row,) = steps_of(tmp_path)
    assert (row["train/policy_version"], row["staleness/max"], row["train/step"]) == (3, 0, 6)
