"""Engines and router that are killed or frozen in a run: it goes on, with nothing lost and nothing doubled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from tests.conftest import save_tiny_model
from tests.e2e.test_failures import Running
from tests.stub_engine.settings import MODULE, StubSettings
from vime.engine.vllm.processes import SERVER_VARIABLE

pytestmark = pytest.mark.engine  # Ray and a trainer; the engines are stubs
ENGINE, ROUTER = "tests.stub_engine", "vime.engine.vllm.router"


@pytest.fixture
def running(
    start_train: Callable[..., subprocess.Popen[str]], grpo_flags: list[str], tmp_path: Path
) -> Callable[..., Running]:
    """Starts a run on stub engines that take a tenth of a second for a token, so that a kill hits requests."""

    def start(*flags: str, program: str = "train.py", token_s: float = 0.1) -> Running:
        stub = StubSettings(token_s=token_s).to_environment()
        environment = {**os.environ, SERVER_VARIABLE: MODULE, **stub}
        fixed = ("--run-dir", str(tmp_path), "--skip-eval-before-train", "--trace")
        return Running(start_train(*grpo_flags, *fixed, *flags, environment=environment, program=program))

    return start


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def total(folder: Path, name: str) -> float:
    return sum(row.get(name, 0.0) for row in metrics(folder))


def test_a_run_outlives_its_engine_and_its_router(running: Callable[..., Running], tmp_path: Path) -> None:
    """One engine: everything waits for it. Killed under requests, then the router, then frozen."""
    run = running("--num-rollout", "5")
    run.wait_for("rollout 1/5")
    run.find(ENGINE).kill()
    run.wait_for("engine 0 serves again")
    run.wait_for("rollout 2/5")
    run.find(ROUTER).kill()
    run.wait_for("the router serves again")
    run.wait_for("rollout 3/5")
    run.find(ENGINE).send_signal(signal.SIGSTOP)
    assert run.end() == 0, run.output
    assert "has been stopped (SIGSTOP)" in run.output
    assert total(tmp_path, "rollout/engine_restarts") == 2
    assert total(tmp_path, "rollout/router_restarts") == 1
    assert total(tmp_path, "rollout/retries") > 0
    assert total(tmp_path, "rollout/num_failed_groups") == 0
    events = [e for path in tmp_path.glob("trace_*.json") for e in json.loads(path.read_text())]
    restarts = [e for e in events if e["name"] == "restart"]
    assert len(restarts) == 2
    assert run.left_behind() == []


@pytest.mark.slow
def test_beyond_the_limit_a_killed_engine_ends_the_run(running: Callable[..., Running]) -> None:
    run = running("--num-rollout", "500", "--rollout-max-restarts", "0")
    run.wait_for("rollout   1/500")
    run.find(ENGINE).kill()
    assert run.end() == 1
    assert "engine 0 failed and is not started again" in run.output, run.output
    assert "exit code -9" in run.output
    assert run.left_behind() == []


def check_rows(folder: Path, num_rollouts: int) -> list[dict[str, float]]:
    """Every rollout was trained on once, with samples that are the engine's under the trainer's weights."""
    rows = [row for row in metrics(folder) if row["step"] >= 0]
    assert [row["step"] for row in rows] == list(range(num_rollouts))
    assert all(row["rollout/num_failed_groups"] == 0 for row in rows)
    # A stream may have finished groups of the next rollout, too, when one is taken.
    assert sum(row.get("rollout/num_groups", 0) for row in rows) == 8 * num_rollouts
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "num_rollouts", "flags"),
    [
        ("train.py", 12, ("--rollout-num-gpus", "2", "--update-weight-transport", "gloo")),
        ("train_async.py", 200, ("--rollout-num-gpus", "2")),  # goes on with the other one while an engine starts
        ("train_async.py", 12, ("--fully-async",)),
    ],
)
def test_real_engines_are_killed_one_after_the_other(
    start_train: Callable[..., subprocess.Popen[str]],
    grpo_flags: list[str],
    tmp_path: Path,
    program: str,
    num_rollouts: int,
    flags: tuple[str, ...],
) -> None:
    fixed = ("--run-dir", str(tmp_path), "--skip-eval-before-train", "--num-rollout", str(num_rollouts))
    run = Running(start_train(*grpo_flags, *fixed, *flags, program=program))
    for done in (1, 2):
        run.wait_for(f"{done}/{num_rollouts} ")
        before = run.output.count("serves again")
        run.find("vime.engine.vllm.launch").kill()
        run.wait_for_more("serves again", before)
    assert run.end() == 0, run.output
    rows = check_rows(tmp_path, num_rollouts)
    assert total(tmp_path, "rollout/engine_restarts") == 2
    if program == "train.py":
        assert all(row["train/train_rollout_logprob_abs_diff"] <= 1e-5 for row in rows), "float32 on both sides"
    assert run.left_behind() == []


@pytest.mark.slow
def test_a_real_engine_runs_out_of_memory(
    start_train: Callable[..., subprocess.Popen[str]], grpo_flags: list[str], tmp_path: Path
) -> None:
    """It may have half of what it has: its next allocation of a size fails, whatever it is at."""
    fixed = ("--run-dir", str(tmp_path), "--skip-eval-before-train", "--num-rollout", "30")
    run = Running(start_train(*grpo_flags, *fixed, "--rollout-health-check-timeout", "30"))
    run.wait_for("rollout  1/30")
    engine = run.find("vime.engine.vllm.launch")
    engine.rlimit(psutil.RLIMIT_AS, (engine.memory_info().vms // 2, psutil.RLIM_INFINITY))
    run.wait_for("serves again")
    assert run.end() == 0, run.output
    assert run.output.count("engine 0 serves again") == 1
    rows = check_rows(tmp_path, 30)
    assert all(row["train/train_rollout_logprob_abs_diff"] <= 1e-5 for row in rows), "float32 on both sides"
    assert run.left_behind() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_engine_that_shares_the_device_is_killed_and_frozen(
    start_train: Callable[..., subprocess.Popen[str]], grpo_flags: list[str], tmp_path: Path
) -> None:
    """Its server in one rollout, its engine core in the next, which is stopped in the third."""
    model = save_tiny_model(tmp_path / "model", "qwen3", dtype="bfloat16")
    run = Running(
        start_train(
            *grpo_flags,
            *("--hf-checkpoint", str(model), "--run-dir", str(tmp_path), "--num-rollout", "40"),
            *("--rollout-batch-size", "8", "--skip-eval-before-train", "--platform", "cuda", "--bf16", "--colocate"),
            *("--offload", "--vllm-enforce-eager", "--vllm-gpu-memory-utilization", "0.2"),
            *("--vllm-kv-cache-memory-bytes", str(1 << 30)),
        )
    )
    for done, (name, number) in enumerate(
        (("vime.engine.vllm.launch", signal.SIGKILL), ("EngineCore", signal.SIGKILL), ("EngineCore", signal.SIGSTOP)), 1
    ):
        run.wait_for(f"rollout {2 * done:2d}/40")
        before = run.output.count("serves again")
        run.find(name).send_signal(number)
        run.wait_for_more("serves again", before)
    assert run.end() == 0, run.output
    rows = check_rows(tmp_path, 40)
    assert total(tmp_path, "rollout/engine_restarts") == 3
    assert all(row["train/train_rollout_logprob_abs_diff"] < 0.03 for row in rows)
    assert run.left_behind() == []
