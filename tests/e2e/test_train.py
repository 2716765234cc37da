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

from vime.observability.rollout_file import read_rollout

pytestmark = pytest.mark.engine

DIFF = "train/train_rollout_logprob_abs_diff"


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_step_reports_agreement_and_times_that_add_up(finished: tuple[Path, str]) -> None:
    rows = metrics_of(finished[0])
    assert [row["step"] for row in rows] == [-1, 0, 1, 2]
    for row in rows[1:]:
        assert 0 < row[DIFF] <= 1e-5, "float32 on both sides"
        assert row[f"{DIFF}_p99"] <= row[f"{DIFF}_max"] < 1e-4
        stages = ("rollout", "make_batch", "train", "update_weights", "save_model", "save_hf", "eval", "other")
        assert sum(row.get(f"perf/{s}_time", 0.0) for s in stages) == pytest.approx(row["perf/step_time"], abs=1e-6)
        assert row["weight_sync/probe_abs_diff_max"] < 1e-4
        assert row["train/policy_version"] == row["step"] + 1
        assert row["train/kl_loss"] >= 0
    assert [row["step"] for row in rows if "eval/heldout" in row] == [-1, 1, 2]


def test_the_first_step_says_where_the_start_spent_its_time(finished: tuple[Path, str]) -> None:
    before, first, *others = metrics_of(finished[0])
    assert not any(name.startswith("start/") for row in (before, *others) for name in row)
    parts = {name: seconds for name, seconds in first.items() if name.startswith("start/")}
    assert {f"start/{p}_s" for p in ("imports", "data", "ray", "engines", "trainer", "update_weights", "eval")} < set(
        parts
    )
    assert sum(parts.values()) == pytest.approx(2 * parts["start/total_s"], abs=1e-6)
    assert "start took " in finished[1]


def test_every_step_says_how_busy_engines_and_trainer_were(finished: tuple[Path, str]) -> None:
    for row in metrics_of(finished[0])[1:]:
        for name in ("perf/trainer_compute_ratio", "perf/engine_busy_ratio", "perf/wait_time_ratio"):
            assert 0 < row[name] < 1, name
        for name in ("queue", "prefill", "decode", "first_token", "total"):
            assert 0 <= row[f"perf/request_latency/{name}"] < row["perf/step_time"], name
        assert row["perf/tokens_per_gpu_per_sec"] >= row["perf/effective_tokens_per_gpu_per_sec"] > 0
        assert row["rollout/log_probs"] == pytest.approx(row["rollout/rollout_log_probs"], abs=1e-5)
        assert row["rollout/ref_log_probs"] < 0
        assert row["perf/actor_train_tflops"] > 0 and row["perf/actor_train_tok_per_s"] > 0
        assert row["memory/driver_rss_bytes"] > 1e8 < row["memory/trainer_rss_bytes"]
        assert row["staleness/max"] == 0
        times = row["perf/step_time"] - sum(row.get(f"perf/{s}_time", 0.0) for s in ("eval", "save_model", "save_hf"))
        assert row["perf/step_time_without_eval_and_save"] == pytest.approx(times)


def test_the_trace_has_stages_ranks_engines_and_samples_on_one_clock(finished: tuple[Path, str]) -> None:
    events = json.loads((finished[0] / "trace_000000.json").read_text())
    spans = [e for e in events if e["ph"] == "X"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(processes.values()) == {"loop", "trainer", "engines", "samples", "held-out samples"}

    def of(process: str, name: str) -> list[dict[str, Any]]:
        return [e for e in spans if processes[e["pid"]] == process and e["name"] == name]

    assert len(of("loop", "step")) == 4 and len(of("samples", "generate")) == 3 * 8 * 4 == len(of("samples", "reward"))
    assert {e["tid"] for e in of("engines", "commit")} == {1, 101} == {e["tid"] for e in of("engines", "rollout")}
    for inner, outer in (
        (of("trainer", "actor_train"), of("loop", "train")),
        (of("samples", "generate"), of("loop", "rollout")),
    ):
        assert all(any(o["ts"] <= i["ts"] and i["ts"] + i["dur"] <= o["ts"] + o["dur"] for o in outer) for i in inner)


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


def test_vime_eval_of_the_export_finds_what_the_last_evaluation_of_training_and_transformers_find(
    finished: tuple[Path, str], run_train: Callable[..., str], task: Path, tmp_path: Path
) -> None:
    """The same weights, greedy, with two engines and no trainer; none of training's settings but the data's keys."""
    import torch
    from transformers import AutoModelForCausalLM

    output = run_train(
        *("--num-rollout", "0", "--platform", "cpu", "--hf-checkpoint", str(finished[0] / "hf")),
        *("--eval-prompt-data", "heldout", str(task / "data" / "heldout.jsonl"), "--eval-temperature", "0"),
        *("--eval-input-key", "problem", "--eval-label-key", "answer"),
        *("--custom-rm-path", "e2e_rewards.share_of_even_tokens"),
        *("--eval-max-response-len", "5", "--eval-max-context-len", "16", "--rollout-num-gpus", "2"),
        *("--run-dir", str(tmp_path)),
    )
    assert "nothing is trained" in output and "Megatron" not in output
    assert "set      prompts  samples  reward" in output
    (row,) = metrics_of(tmp_path)
    assert row["step"] == -1
    trained = metrics_of(finished[0])[-1]
    assert row["eval/heldout"] == trained["eval/heldout"]
    names = ("rollout_000002.parquet", "before_training.parquet")
    folders = (finished[0], tmp_path)
    frames = [pandas.read_parquet(f / "evaluations" / name) for f, name in zip(folders, names, strict=True)]
    assert frames[0]["response"].tolist() == frames[1]["response"].tolist()
    assert json.loads(frames[1]["metadata"][0])["eval_set"] == "heldout"
    model = AutoModelForCausalLM.from_pretrained(finished[0] / "hf")
    for group in read_rollout(tmp_path / "evaluations" / names[1])[:20]:
        (sample,) = group.samples
        with torch.no_grad():
            log_probs = model(torch.tensor([sample.tokens])).logits[0].log_softmax(-1)
        start = len(sample.tokens) - sample.response_length - 1
        of_response = log_probs[torch.arange(start, len(sample.tokens) - 1), list(sample.response_tokens)]
        assert of_response.tolist() == pytest.approx(sample.rollout_log_probs, abs=1e-4)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((), id="same-layout", marks=pytest.mark.slow),  # bit by bit in test_replay.py
        pytest.param(("--tensor-model-parallel-size", "2", "--sequence-parallel"), id="tensor-parallel"),
        pytest.param(("--pipeline-model-parallel-size", "2"), id="pipeline-parallel", marks=pytest.mark.slow),
        pytest.param(("--context-parallel-size", "2"), id="context-parallel", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_goes_on_with_the_next_prompts_step_and_version(
    finished: tuple[Path, str],
    run_train: Callable[..., str],
    grpo_flags: list[str],
    tmp_path: Path,
    layout: tuple[str, ...],
) -> None:
    """Resume from the checkpoint after rollout 1 and repeat rollout 2: same prompts, same answers, same update."""
    folder = finished[0]
    saved = tmp_path / "checkpoints"
    saved.mkdir()
    (saved / "rollout_000001").symlink_to(folder / "checkpoints" / "rollout_000001")
    output = run_train(
        *grpo_flags,
        *("--run-dir", str(tmp_path / "run"), "--num-rollout", "3", "--skip-eval-before-train"),
        *("--load", str(saved), *layout, *(("--actor-num-gpus-per-node", "2") if layout else ())),
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
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 2
    for right in (
        "--rollout-batch-size",
        "--tensor-model-parallel-size",
        "--vllm-gpu-memory-utilization",
        "nowhere/at/all",
    ):
        assert right in output
    assert "Ray" not in output
