"""Runs on several devices: an engine of two, on the CPU beside the trainer, on CUDA on the trainer's own; and on CUDA
one device that trains and one that generates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vime.platform.cuda import CudaPlatform

ON_CPU = ("--platform", "cpu", "--rollout-num-gpus", "2", "--num-cpus", "3")
ON_CUDA = (
    *("--platform", "cuda", "--bf16", "--actor-num-gpus-per-node", "2", "--colocate"),
    *("--vllm-gpu-memory-utilization", "0.3", "--vllm-kv-cache-memory-bytes", str(1 << 30)),
)
ON_CUDA_SEPARATE = (
    *("--platform", "cuda", "--bf16", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"),
    *("--vllm-gpu-memory-utilization", "0.3", "--vllm-kv-cache-memory-bytes", str(1 << 30)),
)
TOO_FEW = pytest.mark.skipif(CudaPlatform().device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize(
    ("flags", "per_engine", "transport", "bound"),
    [
        pytest.param(ON_CPU, 2, "shm", 1e-5, marks=[pytest.mark.engine, pytest.mark.slow], id="cpu"),
        pytest.param(ON_CUDA, 2, "ipc", 0.05, marks=[pytest.mark.gpu, TOO_FEW], id="cuda"),
        pytest.param(ON_CUDA_SEPARATE, 1, "nccl", 0.05, marks=[pytest.mark.gpu, TOO_FEW], id="cuda-separate"),
    ],
)
def test_the_engine_samples_what_the_trainer_scores(
    run_train: Callable[..., str],
    grpo_flags: list[str],
    tmp_path: Path,
    flags: tuple[str, ...],
    per_engine: int,
    transport: str,
    bound: float,
) -> None:
    output = run_train(
        *grpo_flags,
        *("--run-dir", str(tmp_path), "--num-rollout", "2", "--skip-eval-before-train"),
        *("--rollout-num-gpus-per-engine", str(per_engine), *flags),
    )
    assert f"weights travel by {transport}" in output
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step["train/policy_version"] for step in steps if "train/policy_version" in step] == [1, 2]
    for step in steps[-2:]:
        assert step["train/train_rollout_logprob_abs_diff"] < bound, output
        assert step["weight_sync/probe_abs_diff_mean"] < bound
