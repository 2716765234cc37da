"""What a chaos run trains: a model and problems of the quickstart's kind, at its smallest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.chaos.plan import Plan
from tests.chaos.reward import SAMPLES
from tests.stub_engine.settings import MODULE, StubSettings
from vime.engine.vllm.processes import SERVER_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
BATCH = 8
_NUM_PROMPTS = 400


def write_task(folder: Path) -> None:
    """`model/` and `train.jsonl`, whose rows all differ."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"problem": f"{i // 20 + 10}+{i % 20 + 10}=", "answer": "0"} for i in range(_NUM_PROMPTS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    shape = ("--num-layers", "2", "--hidden-size", "64", "--ffn-size", "128")
    command = [sys.executable, "-m", "vime.cli.main", "init-model", str(folder / "model"), "--seed", "0", *shape]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def prompts(folder: Path) -> list[str]:
    """The problems in file order."""
    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["problem"] for line in lines]


def flags(plan: Plan, task: Path, run_dir: Path) -> list[str]:
    """Flags of the round's run; the same ones start it and go on with it."""
    surplus = ("--over-sampling-batch-size", str(BATCH + 4)) if plan.stream is None else ()
    partial = ("--partial-rollout", *surplus) if plan.partial else ()
    stream = plan.stream.flags() if plan.stream is not None else ()
    reward = "share_of_even_tokens" if plan.stream is None else "slow_for_some"
    return [
        *("--platform", "cpu", "--hf-checkpoint", str(task / "model"), "--run-dir", str(run_dir)),
        *("--prompt-data", str(task / "train.jsonl"), "--input-key", "problem", "--label-key", "answer"),
        *("--custom-rm-path", f"tests.chaos.reward.{reward}", "--custom-rm-timeout-s", "8"),
        *("--num-rollout", str(plan.num_rollouts), "--rollout-batch-size", str(BATCH)),
        *("--n-samples-per-prompt", str(SAMPLES), "--rollout-max-response-len", "12"),
        *("--rollout-max-context-len", "32", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "512"),
        *("--rollout-num-gpus", "2" if plan.engine == "stub" else "1"),
        *("--lr", "1e-3", "--lr-warmup-iters", "0", "--weight-probe-interval", "2"),
        *("--save", str(run_dir / "checkpoints"), "--load", str(run_dir / "checkpoints"), "--save-interval", "1"),
        *("--engine-start-timeout-s", "150", "--rollout-max-restarts", "20", "--rollout-restart-backoff-s", "0.2"),
        *("--rollout-health-check-interval", "1", "--rollout-health-check-timeout", "30"),
        *partial,
        *stream,
    ]


def environment(plan: Plan) -> Mapping[str, str]:
    """Of the driver."""
    given = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": _import_path()}
    if plan.engine == "stub":
        given |= {SERVER_VARIABLE: MODULE, **StubSettings(token_s=plan.token_s).to_environment()}
    return given


def _import_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
