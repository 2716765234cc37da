"""What is wrong from the start, tried on `train.py` as a user runs it. Settings alone: tests/cli and tests/config."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine


def test_an_engine_that_dies_at_start_ends_the_run_with_its_last_words(
    start_train: Callable[..., subprocess.Popen[str]], task: Path, tmp_path: Path
) -> None:
    process = start_train(
        *("--num-rollout", "0", "--platform", "cpu", "--hf-checkpoint", str(task / "model")),
        *("--eval-prompt-data", "heldout", str(task / "data" / "heldout.jsonl"), "--rm-type", "exact_match"),
        *("--eval-input-key", "problem", "--eval-label-key", "answer", "--eval-max-response-len", "5"),
        *("--vllm-max-num-seqs", "8", "--vllm-max-num-batched-tokens", "4", "--run-dir", str(tmp_path)),
    )
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 1, output
    assert "the vLLM server ended with exit code" in output
    assert "max_num_batched_tokens" in output, "what vLLM itself said"
    assert f"end of {tmp_path / 'logs' / 'engine_0.log'}" in output
    assert "Traceback (most recent call last)" not in output.split("the vLLM server ended")[0], "a user's mistake"
