"""PPO by `train.py`: real Ray, vLLM and Megatron; a critic beside the policy of a tiny Qwen3."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

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
