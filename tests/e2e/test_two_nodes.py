"""Two Ray nodes: the trainer on one and the engines on the other, then both on both."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.orchestration.two_nodes import Cluster, two_ray_nodes

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One CPU on the first node, two on the second."""
    with two_ray_nodes(tmp_path_factory.mktemp("ray"), num_cpus=(1, 2)) as cluster:
        yield cluster


@pytest.fixture
def train(
    cluster: Cluster, start_train: Callable[..., subprocess.Popen[str]], grpo_flags: list[str], tmp_path: Path
) -> Callable[..., tuple[list[dict[str, Any]], str]]:
    """A function (*flags) that runs GRPO on the cluster: rows of the training steps, and what the run said."""

    def train(*flags: str) -> tuple[list[dict[str, Any]], str]:
        process = start_train(
            *(*grpo_flags, "--ray-address", cluster.address, "--run-dir", str(tmp_path), "--skip-eval-before-train"),
            *flags,
            environment=cluster.environment,
        )
        output, _ = process.communicate(timeout=900)
        assert process.returncode == 0, output
        rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        return [row for row in rows if row["step"] >= 0], " ".join(output.split())

    return train


def test_grpo_with_the_trainer_on_one_node_and_two_engines_on_the_other(train: Callable[..., Any]) -> None:
    rows, output = train("--rollout-num-gpus", "2", "--num-rollout", "3")
    assert len(rows) == 3
    for row in rows:
        assert row["train/train_rollout_logprob_abs_diff"] <= 1e-5, "float32 on both sides"
        assert row["weight_sync/probe_abs_diff_max"] < 1e-4
        assert row["train/policy_version"] == row["step"] + 1
    assert "trainer on 127.0.0.2; engines on 127.0.0.3; router on 127.0.0.2; weights travel by gloo" in output


def test_grpo_with_ranks_and_engines_on_both_nodes(train: Callable[..., Any]) -> None:
    rows, output = train("--actor-num-nodes", "2", "--actor-num-gpus-per-node", "1", "--colocate", "--num-rollout", "2")
    assert len(rows) == 2
    for row in rows:
        assert row["train/train_rollout_logprob_abs_diff"] <= 1e-5
        assert row["weight_sync/probe_abs_diff_max"] < 1e-4
    assert "trainer on 127.0.0.2, 127.0.0.3; engines on 127.0.0.2, 127.0.0.3; router on 127.0.0.2" in output
