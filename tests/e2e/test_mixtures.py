"""GRPO of mixtures of experts as a user runs it: real Ray, vLLM behind the router, Megatron, verified syncs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas
import pytest
import torch

from tests.conftest import save_tiny_model
from vime.loop.checkpoint import open_checkpoint

pytestmark = pytest.mark.engine

DIFF = "train/train_rollout_logprob_abs_diff"
MTP = "model.layers.3."  # of the tiny GLM, behind its three layers


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        # What it does, GLM does too, and its expert-parallel row.
        pytest.param("qwen3_moe", (), id="qwen3_moe", marks=pytest.mark.slow),
        pytest.param("glm4_moe", (), id="glm4_moe"),
        pytest.param(
            "qwen3_moe",
            ("--expert-model-parallel-size", "2"),
            id="qwen3_moe-expert-parallel",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "glm4_moe",
            ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
            id="glm4_moe-tensor-parallel",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_steps_agree_with_the_engine_and_leave_a_checkpoint_and_an_export(
    run_train: Callable[..., str], grpo_flags: list[str], tmp_path: Path, kind: str, layout: tuple[str, ...]
) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model, out = save_tiny_model(tmp_path / "model", kind), tmp_path / "hf"
    run_train(
        *grpo_flags,
        *("--hf-checkpoint", str(model), "--run-dir", str(tmp_path / "run"), "--num-rollout", "2"),
        *("--rollout-batch-size", "4", "--skip-eval-before-train", "--save", str(tmp_path / "checkpoints")),
        *("--save-hf", str(out), *layout, *(("--actor-num-gpus-per-node", "2") if layout else ())),
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] >= 0]
    assert [row["train/policy_version"] for row in rows] == [1, 2]
    for row in rows:
        assert 0 < row[DIFF] <= 1e-5 and row[f"{DIFF}_max"] < 1e-4, "float32 on both sides"
        assert row["weight_sync/probe_abs_diff_max"] < 1e-4
        assert row["train/grad_norm"] > 0 and row["train/pg_loss"] != 0
    frame = pandas.read_parquet(tmp_path / "run" / "rollouts" / "rollout_000001.parquet")
    assert {span["version"] for spans in frame["weight_versions"] for span in spans} == {2}, "trained once before"
    assert open_checkpoint(tmp_path / "checkpoints").rollout_id == 1

    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    assert {n: (t.shape, t.dtype) for n, t in after.items()} == {n: (t.shape, t.dtype) for n, t in before.items()}
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    kept = {name for name in before if name.startswith(MTP) or name.endswith("e_score_correction_bias")}
    assert bool(kept) == (kind == "glm4_moe") and kept <= unchanged, "neither is trained"
    # An expert may have had no token; every other tensor has a gradient.
    assert all(".experts." in name for name in unchanged - kept)
    assert sum(".experts." in name for name in before.keys() - unchanged) > 20
    loaded, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    assert torch.equal(loaded.lm_head.weight, after["lm_head.weight"])
