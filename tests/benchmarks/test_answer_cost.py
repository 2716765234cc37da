"""Stub answers go the whole way through vLLM's serving and vime's client, and vime's answers are the smaller ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_both_kinds_of_answers_are_timed(tmp_path: Path) -> None:
    sizes = ["--prompts", "2", "--samples", "2", "--prompt-len", "4", "--response-len", "32"]
    command = [sys.executable, "benchmarks/answer_cost.py", *sizes, "--out", str(tmp_path / "out.jsonl")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    own, short = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert (own["answers"], short["answers"]) == ("vllm", "short")
    assert short["answer_bytes"] < own["answer_bytes"] / 4
    assert set(own["cpu_s"]) == set(short["cpu_s"]) >= {"server", "parse", "samples"}
