"""R3 as a user runs it: engines say which experts they used, and the trainer uses the same ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import save_tiny_model
from vime.observability.rollout_file import read_rollout, write_rollout
from vime.types import Group, Sample

pytestmark = [pytest.mark.engine, pytest.mark.slow]

DIFF, MISSING = "train/train_rollout_logprob_abs_diff", "train/routing_replay_missing"


def steps(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] >= 0]


def with_other_experts(sample: Sample) -> Sample:
    """As if every token had been routed to the next experts."""
    fields = {name: getattr(sample, name) for name in sample.__dataclass_fields__}
    rows = sample.routed_experts
    assert rows is not None
    return Sample(**fields | {"routed_experts": ((rows + 1) % 8).astype(np.uint8)})


def of_few_held_out(grpo_flags: list[str], task: Path, tmp_path: Path) -> list[str]:
    """The flags with four held-out prompts, evaluated after the last step, by the interpreter as well."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join((task / "data" / "heldout.jsonl").read_text().splitlines(True)[:4]))
    at = grpo_flags.index("--eval-prompt-data")
    few = ("--eval-prompt-data", "heldout", str(held_out), "--skip-eval-before-train")
    return [*grpo_flags[:at], *grpo_flags[at + 3 :], *few]


@pytest.mark.parametrize(("kind", "layers"), [("qwen3_moe", (0, 1)), ("glm4_moe", (1, 2))])
def test_three_steps_replay_what_the_engine_routed(
    run_train: Callable[..., str], grpo_flags: list[str], task: Path, tmp_path: Path, kind: str, layers: tuple[int, ...]
) -> None:
    model, run = save_tiny_model(tmp_path / "model", kind), tmp_path / "run"
    flags = [
        *of_few_held_out(grpo_flags, task, tmp_path),
        *("--hf-checkpoint", str(model), "--rollout-batch-size", "4"),
        *("--weight-probe-interval", "0", "--use-rollout-routing-replay"),
        *("--lr-decay-iters", "6"),
    ]
    run_train(*flags, "--run-dir", str(run), "--num-rollout", "3")
    rows = steps(run)
    assert [row["train/policy_version"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert 0 < row[DIFF] <= 1e-5 and row[f"{DIFF}_max"] < 1e-4, "float32 on both sides"
        assert row[MISSING] == row[f"{MISSING}_share"] == 0
        assert row["train/grad_norm"] > 0

    # The file has what is replayed: with other experts in it, training finds other log-probs, and nowhere else.
    groups = read_rollout(run / "rollouts" / "rollout_000000.parquet")
    for sample in (sample for group in groups for sample in group.samples):
        assert sample.routed_experts is not None and sample.routed_experts.dtype == np.uint8
        assert sample.routed_experts.shape == (len(sample.tokens) - 1, 2 + (kind == "glm4_moe"), 2)
        used = sample.routed_experts.any(axis=(0, 2))
        assert [layer for layer in range(len(used)) if used[layer]] == list(layers)
    write_rollout(
        tmp_path / "other.parquet", 0, [Group(g.group_id, [*map(with_other_experts, g.samples)]) for g in groups]
    )
    for name, path in (("same", run), ("other", tmp_path / "other.parquet")):
        alone = ["--run-dir", str(tmp_path / name), "--num-rollout", "1", "--debug-train-only"]
        run_train(*flags, *alone, "--load-debug-rollout-data", str(path))
    (same,), (other,) = steps(tmp_path / "same"), steps(tmp_path / "other")
    assert same[DIFF] == rows[0][DIFF] and same["train/loss"] == rows[0]["train/loss"]
    assert other[DIFF] > 0.01


@pytest.mark.parametrize("per_engine", [1, 2])
def test_two_engines_and_an_engine_of_two_devices_say_what_they_routed(
    run_train: Callable[..., str], grpo_flags: list[str], task: Path, tmp_path: Path, per_engine: int
) -> None:
    """A group is sampled by one engine each time, and workers of an engine route alike; with top-k and top-p."""
    output = run_train(
        *of_few_held_out(grpo_flags, task, tmp_path),
        *("--hf-checkpoint", str(save_tiny_model(tmp_path / "model", "qwen3_moe")), "--run-dir", str(tmp_path / "run")),
        *("--rollout-batch-size", "4", "--num-rollout", "2", "--weight-probe-interval", "0", "--lr-decay-iters", "4"),
        *("--use-rollout-routing-replay", "--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", str(per_engine)),
        *("--num-cpus", "3", "--router-policy", "round_robin", "--rollout-top-k", "4", "--rollout-top-p", "0.9"),
    )
    rows = steps(tmp_path / "run")
    assert [row["train/policy_version"] for row in rows] == [1, 2], output
    for row in rows:
        assert 0 < row[DIFF] <= 1e-5 and row[MISSING] == 0, "of the same weights in every engine"
