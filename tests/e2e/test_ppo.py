"""PPO by `train.py`: real Ray, vLLM and Megatron; a critic beside the policy of a tiny Qwen3."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine


def test_two_steps_train_policy_and_critic(
    run_train: Callable[..., str], grpo_flags: list[str], tmp_path: Path
) -> None:
    output = run_train(
        *grpo_flags,
        *("--advantage-estimator", "ppo", "--n-samples-per-prompt", "4", "--run-dir", str(tmp_path)),
        *("--critic-lr", "1e-3", "--critic-lr-warmup-iters", "1", "--lambd", "0.9", "--gamma", "0.99"),
        *("--normalize-advantages", "--num-rollout", "2", "--skip-eval-before-train", "--num-critic-only-steps", "1"),
    )
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first, second = (row for row in rows if row["step"] >= 0)
    # The critic begins with a value of 0 for everything: its first error is the rewards' square.
    assert first["rollout/values"] == 0 < first["train/critic-value_loss"]
    assert "train/loss" not in first and first["train/train_rollout_logprob_abs_diff"] < 1e-5
    assert second["rollout/values"] > 0 and second["rollout/returns"] > 0, output
    for row in (first, second):
        assert row["train/critic-grad_norm"] > 0
        assert row["rollout/advantages"] == pytest.approx(0, abs=1e-9)
        assert row["rollout/advantages/std"] == pytest.approx(1, rel=0.01)
        assert 0 < row["perf/values_time"] + row["perf/critic_train_time"] < row["perf/train_time"]
        assert 0 < row["train/critic-lr-pg_0"] <= 1e-3
    assert second["train/grad_norm"] > 0 and second["train/train_rollout_logprob_abs_diff"] < 1e-5
    assert second["rollout/raw_reward"] > 0


@pytest.mark.slow  # three runs
def test_a_critic_on_devices_of_its_own_trains_beside_the_policy_and_is_resumed(
    run_train: Callable[..., str], grpo_flags: list[str], tmp_path: Path
) -> None:
    """Two ranks of its own, stopped and resumed; then a critic in turn is trained on the same rollouts."""
    flags = [
        *grpo_flags,
        *("--advantage-estimator", "ppo", "--critic-lr", "1e-3", "--lambd", "0.9", "--normalize-advantages"),
        *("--num-critic-only-steps", "1", "--skip-eval-before-train", "--lr-decay-iters", "6"),
    ]
    apart, saved = tmp_path / "apart", tmp_path / "checkpoints"
    own = [
        *flags,
        *("--critic-num-gpus-per-node", "2", "--num-cpus", "4", "--run-dir", str(apart), "--trace"),
        *("--load", str(saved), "--save", str(saved), "--save-interval", "1", "--async-save"),
    ]
    output = run_train(*own, "--num-rollout", "2")
    assert "; critic on " in output
    assert (saved / "rollout_000001" / "critic").is_dir() and (saved / "rollout_000001" / "trainer").is_dir()
    output = run_train(*own, "--num-rollout", "3")
    assert "next is rollout 2" in output
    in_turn = tmp_path / "in turn"
    run_train(
        *flags,
        *("--run-dir", str(in_turn), "--load-debug-rollout-data", str(apart), "--debug-train-only"),
        *("--num-rollout", "3"),
    )
    got, want = steps_of(apart), steps_of(in_turn)
    assert len(got) == len(want) == 3
    for row, other in zip(got, want, strict=True):
        names = [n for n in other if n.startswith(("train/critic-", "rollout/advantages", "rollout/values"))]
        names += [n for n in ("train/loss", "train/grad_norm", "rollout/returns") if n in other]
        assert {n: row[n] for n in names} == pytest.approx({n: other[n] for n in names}, rel=1e-3, abs=1e-5)
        assert row["perf/critic_apart_values_time"] > 0 and row["perf/critic_apart_train_time"] > 0
        assert "perf/critic_train_time" not in row
    assert got[2]["rollout/values"] != 0 and got[2]["train/critic-grad_norm"] > 0
    events = json.loads((apart / "trace_000000.json").read_text())
    names = {e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")}
    assert {"critic", "critic rank 0", "critic rank 1"} <= names


def steps_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/critic-value_loss" in row]
