"""`train.py` as a user runs it: real Ray, vLLM behind the router, Megatron, on a tiny model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
import yaml

pytestmark = pytest.mark.engine

DIFF = "train/train_rollout_logprob_abs_diff"


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(
    run_train: Callable[..., str], grpo_flags: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """The run folder and output of three rollouts with two engines, checkpoints after each, and an HF export."""
    folder = tmp_path_factory.mktemp("run")
    output = run_train(
        *grpo_flags,
        *("--run-dir", str(folder), "--num-rollout", "3", "--eval-interval", "2", "--rollout-num-gpus", "2"),
        *("--use-kl-loss", "--kl-loss-coef", "0.01", "--use-tensorboard"),
        *("--save", str(folder / "checkpoints"), "--save-interval", "2", "--save-hf", str(folder / "hf")),
    )
    return folder, output


def test_every_step_reports_agreement_and_times_that_add_up(finished: tuple[Path, str]) -> None:
    rows = metrics_of(finished[0])
    assert [row["step"] for row in rows] == [-1, 0, 1, 2]
    for row in rows[1:]:
        assert 0 < row[DIFF] <= 1e-5, "float32 on both sides"
        assert row[f"{DIFF}_p99"] <= row[f"{DIFF}_max"] < 1e-4
        stages = ("rollout", "make_batch", "train", "update_weights", "save_model", "eval", "other")
        assert sum(row.get(f"perf/{s}_time", 0.0) for s in stages) == pytest.approx(row["perf/step_time"], abs=1e-6)
        assert row["weight_sync/probe_abs_diff_max"] < 1e-4
        assert row["train/policy_version"] == row["step"] + 1
        assert row["train/kl_loss"] >= 0
    assert [row["step"] for row in rows if "eval/heldout" in row] == [-1, 1, 2]


def test_the_run_folder_holds_settings_versions_rollouts_and_events(finished: tuple[Path, str]) -> None:
    folder, output = finished
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    assert settings["settings"]["rollout"]["num_rollout"] == 3
    assert settings["origin"]["num-rollout"] == "command line"
    assert json.loads((folder / "versions.json").read_text())["packages"]["megatron-core"] == "0.16.1"
    assert list((folder / "tensorboard").glob("events*"))
    assert f"run folder {folder}" in output
    frame = pandas.read_parquet(folder / "rollouts" / "rollout_000001.parquet")
    assert len(frame) == 8 * 4
    assert frame.groupby("group_id").size().tolist() == [4] * 8
    assert {span["version"] for spans in frame["weight_versions"] for span in spans} == {2}, "trained once before"


def test_the_final_checkpoint_loads_in_transformers_and_in_vllm(
    finished: tuple[Path, str], start_engine: Callable[..., Any], run_key: str
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from vime.engine.vllm.client import VllmEngine

    folder = finished[0] / "hf"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.encode("12+34=", add_special_tokens=False)
    engine = VllmEngine(start_engine(folder).url, run_key)
    (answer,) = engine.probe([prompt], 8).completions
    tokens = torch.tensor([[*prompt, *answer.token_ids]])
    with torch.no_grad():
        log_probs = model(tokens).logits[0].log_softmax(-1)
    for i, (token, log_prob) in enumerate(zip(answer.token_ids, answer.log_probs, strict=True)):
        assert log_probs[len(prompt) + i - 1, token].item() == pytest.approx(log_prob, abs=1e-4)


def test_a_resumed_run_goes_on_with_the_next_prompts_step_and_version(
    finished: tuple[Path, str], run_train: Callable[..., str], grpo_flags: list[str], tmp_path: Path
) -> None:
    """Resume from the checkpoint after rollout 1 and repeat rollout 2: same prompts, same answers, same update."""
    folder = finished[0]
    saved = tmp_path / "checkpoints"
    saved.mkdir()
    (saved / "rollout_000001").symlink_to(folder / "checkpoints" / "rollout_000001")
    output = run_train(
        *grpo_flags,
        *("--run-dir", str(tmp_path / "run"), "--num-rollout", "3", "--skip-eval-before-train"),
        *("--use-kl-loss", "--kl-loss-coef", "0.01", "--load", str(saved)),
    )
    assert "next is rollout 2" in output
    (again,) = metrics_of(tmp_path / "run")
    before = metrics_of(folder)[-1]
    for name in ("step", "train/step", "train/policy_version", "train/lr-pg_0"):
        assert again[name] == before[name], name
    frames = [pandas.read_parquet(f / "rollouts" / "rollout_000002.parquet") for f in (folder, tmp_path / "run")]
    assert frames[0]["prompt"].tolist() == frames[1]["prompt"].tolist()
    assert frames[0]["response"].tolist() == frames[1]["response"].tolist()
    assert again["train/loss"] == pytest.approx(before["train/loss"], abs=1e-5)
    assert again["train/grad_norm"] == pytest.approx(before["train/grad_norm"], rel=1e-3)


def test_wrong_settings_are_all_named_before_anything_starts(start_train: Callable[..., subprocess.Popen[str]]) -> None:
    process = start_train(
        *("--rollout-bach-size", "8", "--tensor-model-paralel-size", "2", "--vllm-gpu-memory-utilisation", "0.5"),
        *("--hf-checkpoint", "nowhere/at/all", "--num-rollout", "1", "--lr", "1e-3"),
    )
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    for right in (
        "--rollout-batch-size",
        "--tensor-model-parallel-size",
        "--vllm-gpu-memory-utilization",
        "nowhere/at/all",
    ):
        assert right in output
    assert "Ray" not in output
