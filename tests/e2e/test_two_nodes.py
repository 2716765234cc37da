"""Two Ray nodes: the trainer on one and the engines on the other, then both on both."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT
from tests.orchestration.two_nodes import Cluster, two_ray_nodes

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One CPU on the first node, two on the second."""
    with two_ray_nodes(tmp_path_factory.mktemp("ray"), num_cpus=(1, 2)) as cluster:
        yield cluster


def train(cluster: Cluster, folder: Path, *flags: str) -> tuple[list[dict[str, Any]], str]:
    """Rows of the training steps, and what the run said."""
    done = subprocess.run(
        [
            *(sys.executable, "train.py", "--ray-address", cluster.address, "--run-dir", str(folder)),
            *("--skip-eval-before-train", *flags),
        ],
        cwd=ROOT,
        env={**cluster.environment, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] >= 0], output


def test_grpo_with_the_trainer_on_one_node_and_two_engines_on_the_other(
    cluster: Cluster, grpo_flags: list[str], tmp_path: Path
) -> None:
    rows, output = train(cluster, tmp_path, *grpo_flags, "--rollout-num-gpus", "2", "--num-rollout", "3")
    assert len(rows) == 3
    for row in rows:
        assert row["train/train_rollout_logprob_abs_diff"] <= 1e-5, "float32 on both sides"
        assert row["weight_sync/probe_abs_diff_max"] < 1e-4
        assert row["train/policy_version"] == row["step"] + 1
    wanted = "trainer on 127.0.0.2; engines on 127.0.0.3; router on 127.0.0.2; weights travel by gloo"
    assert wanted in " ".join(output.split())


def test_grpo_with_ranks_and_engines_on_both_nodes(cluster: Cluster, grpo_flags: list[str], tmp_path: Path) -> None:
    rows, output = train(cluster, tmp_path, *grpo_flags, "--actor-num-nodes", "2", "--colocate", "--num-rollout", "2")
    assert len(rows) == 2
    for row in rows:
        assert row["train/train_rollout_logprob_abs_diff"] <= 1e-5
        assert row["weight_sync/probe_abs_diff_max"] < 1e-4
    wanted = "trainer on 127.0.0.2, 127.0.0.3; engines on 127.0.0.2, 127.0.0.3; router on 127.0.0.2; weights"
    assert wanted in " ".join(output.split())
