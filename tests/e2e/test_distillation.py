"""A run that learns from a teacher in a vLLM server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import ROOT
from vime.engine.vllm.processes import free_port, stop_process
from vime.observability.rollout_file import read_rollout

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_student_learns_from_a_served_teacher(
    run_train: Callable[..., str], grpo_flags: list[str], task: Path, tmp_path: Path
) -> None:
    """The server's log-probs are those of the teacher's model, and the run goes on from the files without it."""
    teacher, key_file, port = tmp_path / "teacher", tmp_path / "key", free_port()
    command = [sys.executable, "-m", "vime.cli.main", "init-model", str(teacher), "--seed", "5"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "vime.cli.main", "engine", "--hf-checkpoint", str(teacher), "--platform", "cpu"),
            *("--port", str(port), "--key-file", str(key_file), "--log-file", str(tmp_path / "engine.log")),
            *("--rollout-max-context-len", "17"),
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    folder = tmp_path / "run"
    flags = [*grpo_flags, "--skip-eval-before-train", "--num-rollout", "2", "--use-opd"]
    served = ["--opd-teacher-url", f"http://127.0.0.1:{port}", "--opd-teacher-key-file", str(key_file)]
    try:
        assert server.stdout is not None
        lines = [server.stdout.readline().decode() for _ in range(2)]
        assert "ready" in lines[1], lines
        run_train(*flags, *served, "--run-dir", str(folder))
    finally:
        stop_process(server, 20.0)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 1 and rows[-1]["rollout/teacher/retries"] == 0 and "train/opd_kl" in rows[-1]
    samples = [s for g in read_rollout(folder / "rollouts" / "rollout_000000.parquet") for s in g.samples]
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    for sample in samples[:4]:
        ids = torch.tensor([sample.tokens])
        with torch.no_grad():
            log_probs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        assert sample.teacher_log_probs == pytest.approx(log_probs[-sample.response_length :].tolist(), abs=1e-4)


def test_a_teacher_in_the_trainer_and_the_weights_that_sampled(
    run_train: Callable[..., str], grpo_flags: list[str], tmp_path: Path
) -> None:
    """One step ahead each rollout but the first is of the version before, whose weights are still there."""
    teacher, folder = tmp_path / "teacher", tmp_path / "run"
    command = [sys.executable, "-m", "vime.cli.main", "init-model", str(teacher), "--seed", "5"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    run_train(
        *grpo_flags,
        *("--skip-eval-before-train", "--num-rollout", "3", "--run-dir", str(folder), "--ref-update-interval", "2"),
        *("--use-opd", "--opd-teacher-load", str(teacher), "--keep-old-actor"),
        program="train_async.py",
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/opd_kl" in row]
    assert [row.get("train/old_actor_ratio") for row in steps] == [None, 1.0, 1.0]
    assert [row["train/reference_rollout"] for row in steps] == [-1, 1, 1]
    assert all(abs(row["train/ppo_kl"]) < 1 for row in steps) and all("perf/teacher_log_probs_time" in r for r in steps)
