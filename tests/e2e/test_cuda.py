"""GRPO on CUDA devices: trainer and engine on one in turn (dense, mixtures, an MTP layer), or on one each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import save_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "glm4_moe"])
def test_three_steps_in_bf16_agree_with_the_engine(
    run_train: Callable[..., str], grpo_flags: list[str], tmp_path: Path, kind: str
) -> None:
    model = save_tiny_model(tmp_path / "model", kind, dtype="bfloat16")
    output = run_train(
        *grpo_flags,
        *("--hf-checkpoint", str(model), "--run-dir", str(tmp_path / "run"), "--num-rollout", "3"),
        *("--rollout-batch-size", "4", "--skip-eval-before-train", "--platform", "cuda", "--bf16", "--colocate"),
        *("--vllm-enforce-eager", "--vllm-gpu-memory-utilization", "0.2"),
        *("--vllm-kv-cache-memory-bytes", str(1 << 30)),
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] >= 0]
    assert [row["train/policy_version"] for row in rows] == [1, 2, 3]
    assert "weights travel by ipc" in output
    print({kind: [row["train/train_rollout_logprob_abs_diff"] for row in rows]})
    for row in rows:
        # At this rate an expert chosen otherwise moves a token by up to 4; the test of R3 below bounds mixtures.
        assert 0 < row["train/train_rollout_logprob_abs_diff"] and (
            kind != "qwen3" or row["train/train_rollout_logprob_abs_diff"] < 0.03
        ), output
        assert row["weight_sync/probe_abs_diff_mean"] < 0.03, output
        assert row["train/grad_norm"] > 0


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_three_steps_replay_what_the_engine_routed(
    run_train: Callable[..., str], grpo_flags: list[str], tmp_path: Path, kind: str
) -> None:
    model = save_tiny_model(tmp_path / "model", kind, dtype="bfloat16")
    diffs = {}
    for replays in (True, False):
        run = tmp_path / f"run_{replays}"
        output = run_train(
            *grpo_flags,
            *("--hf-checkpoint", str(model), "--run-dir", str(run), "--num-rollout", "3", "--rollout-batch-size", "4"),
            *("--skip-eval-before-train", "--platform", "cuda", "--bf16", "--colocate", "--vllm-enforce-eager"),
            *("--vllm-gpu-memory-utilization", "0.2", "--vllm-kv-cache-memory-bytes", str(1 << 30)),
            *(("--use-rollout-routing-replay",) if replays else ()),
        )
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rows = [row for row in rows if row["step"] >= 0]
        assert [row["train/policy_version"] for row in rows] == [1, 2, 3]
        diffs[replays] = [row["train/train_rollout_logprob_abs_diff"] for row in rows]
        for row in rows:
            assert row.get("train/routing_replay_missing") == (0 if replays else None), output
            assert ("train/routing_replay_differs" in row) == replays
            assert row["train/grad_norm"] > 0
    print({kind: diffs})
    assert all(0 < diff < 0.03 for diff in diffs[True]), "the engine's experts, all but the rounding of bf16"


def test_policy_critic_and_engine_take_turns(
    run_train: Callable[..., str], grpo_flags: list[str], tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path / "model", "qwen3", dtype="bfloat16")
    output = run_train(
        *grpo_flags,
        *("--hf-checkpoint", str(model), "--run-dir", str(tmp_path / "run"), "--num-rollout", "3"),
        *("--advantage-estimator", "ppo", "--critic-lr", "1e-3", "--lambd", "0.95", "--normalize-advantages"),
        *("--rollout-batch-size", "4", "--skip-eval-before-train", "--platform", "cuda", "--bf16", "--colocate"),
        *("--offload", "--vllm-enforce-eager", "--vllm-gpu-memory-utilization", "0.2"),
        *("--vllm-kv-cache-memory-bytes", str(1 << 30)),
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] >= 0]
    assert rows[0]["rollout/values"] == 0 != rows[2]["rollout/values"], output
    for row in rows:
        assert row["train/critic-grad_norm"] > 0 and row["train/grad_norm"] > 0, output
        assert 0 < row["train/train_rollout_logprob_abs_diff"] < 0.03, output


def test_twenty_steps_in_which_both_sides_take_turns_take_no_more_memory(
    run_train: Callable[..., str], grpo_flags: list[str], tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path / "model", "qwen3_moe", dtype="bfloat16")
    output = run_train(
        *grpo_flags,
        *("--hf-checkpoint", str(model), "--run-dir", str(tmp_path / "run"), "--num-rollout", "20"),
        *("--rollout-batch-size", "4", "--skip-eval-before-train", "--eval-interval", "10", "--platform", "cuda"),
        *("--bf16", "--colocate", "--offload", "--vllm-enforce-eager", "--vllm-gpu-memory-utilization", "0.2"),
        *("--vllm-kv-cache-memory-bytes", str(4 << 30), "--weight-probe-interval", "5"),
        *("--save", str(tmp_path / "ck"), "--save-interval", "10", "--save-hf", str(tmp_path / "hf"), "--async-save"),
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] >= 0]
    assert [row["train/policy_version"] for row in rows] == list(range(1, 21))
    used = {at: [row[f"memory/device_used_in_{at}_bytes"] for row in rows] for at in ("training", "sync", "generation")}
    times = {what: [row[f"perf/{what}_time"] for row in rows] for what in ("sleep", "wake", "offload", "onload")}
    print({"used MiB": {at: [v / 2**20 for v in values] for at, values in used.items()}, "seconds": times})
    print([line for line in output.splitlines() if "shared" in line or "moves" in line])
    for values in used.values():
        assert max(values[3:]) - values[3] < 64 << 20, output
    assert min(used["generation"]) - max(used["training"]) > 3 << 30  # the engine's KV cache, which sleeps meanwhile
    for row in rows:
        assert 0 < row["train/train_rollout_logprob_abs_diff"] < 0.03, output
    assert sum("weight_sync/probe_abs_diff_mean" in row for row in rows) >= 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="trainer and engine need a device each")
@pytest.mark.parametrize("interval", [1, 2])
def test_one_step_ahead_on_devices_of_their_own(
    run_train: Callable[..., str], grpo_flags: list[str], tmp_path: Path, interval: int
) -> None:
    model = save_tiny_model(tmp_path / "model", "qwen3", dtype="bfloat16")
    output = run_train(
        *grpo_flags,
        *("--hf-checkpoint", str(model), "--run-dir", str(tmp_path / "run"), "--num-rollout", "6"),
        *("--rollout-batch-size", "4", "--eval-interval", "4", "--platform", "cuda", "--bf16"),
        *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--update-weights-interval", str(interval)),
        *("--vllm-enforce-eager", "--vllm-gpu-memory-utilization", "0.2"),
        *("--vllm-kv-cache-memory-bytes", str(1 << 30)),
        program="train_async.py",
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] >= 0]
    assert [row["train/policy_version"] for row in rows] == (
        [1, 1, 2, 3, 4, 5] if interval == 1 else [1, 1, 1, 3, 3, 5]
    )
    assert [row["staleness/max"] for row in rows] == ([0, 1, 1, 1, 1, 1] if interval == 1 else [0, 1, 2, 1, 2, 1])
    assert 0 < rows[0]["train/train_rollout_logprob_abs_diff"] < 0.03, output
    assert all(row["weight_sync/probe_abs_diff_mean"] < 0.03 for row in rows if "weight_sync/seconds" in row), output
