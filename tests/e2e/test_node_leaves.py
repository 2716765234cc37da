"""One of two Ray nodes leaves: it goes silent, as when its machine or network fails, or its processes are killed."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.test_failures import Running
from tests.e2e.test_recovery import check_rows, metrics
from tests.orchestration.two_nodes import Cluster, two_ray_nodes
from tests.stub_engine.settings import MODULE, StubSettings
from vime.data.accounting import account_of
from vime.engine.vllm.processes import SERVER_VARIABLE

pytestmark = [pytest.mark.engine, pytest.mark.slow]
STUBS = {SERVER_VARIABLE: MODULE, **StubSettings(token_s=0.1).to_environment()}
END_S = 3000.0


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two CPUs on the first node, one on the second, which has what the first has no room for."""
    with two_ray_nodes(tmp_path_factory.mktemp("ray"), num_cpus=(2, 1), variables=STUBS) as cluster:
        yield cluster


@pytest.fixture
def start(
    cluster: Cluster, start_train: Callable[..., subprocess.Popen[str]], grpo_flags: list[str], tmp_path: Path
) -> Callable[..., Running]:
    fixed = ("--ray-address", cluster.address, "--run-dir", str(tmp_path), "--skip-eval-before-train")
    saves = ("--save", str(tmp_path / "ckpt"), "--load", str(tmp_path / "ckpt"), "--save-interval", "1")
    return lambda *flags: Running(start_train(*grpo_flags, *fixed, *saves, *flags, environment=cluster.environment))


def test_the_engine_of_a_node_that_goes_silent_is_done_without(
    cluster: Cluster, start: Callable[..., Running], tmp_path: Path
) -> None:
    """Connections to it stay open, and requests that it has wait for ever."""
    run = start("--rollout-num-gpus", "2", "--update-weight-transport", "disk", "--num-rollout", "6")
    run.wait_for("rollout 2/6", 3000)
    cluster.signal_second(signal.SIGSTOP)
    assert run.end(END_S) == 0, run.output
    assert "its node has left the cluster; the run goes on without it" in run.output
    check_rows(tmp_path, 6)


def test_a_broadcast_to_the_engine_of_a_node_that_is_gone_ends_the_run_which_can_be_resumed(
    cluster: Cluster, start: Callable[..., Running], tmp_path: Path
) -> None:
    run = start("--rollout-num-gpus", "2", "--num-rollout", "6")
    run.wait_for("rollout 2/6", 3000)
    cluster.signal_second(signal.SIGKILL)
    assert run.end(END_S) == 1, run.output
    assert "1 of 2 engines are left" in run.output, run.output
    again = start("--rollout-num-gpus", "1", "--num-rollout", "6")
    assert again.end(END_S) == 0, again.output
    steps = [row["step"] for row in metrics(tmp_path) if row["step"] >= 0]
    assert steps == [0, 1, 2, 3, 4, 5], "the step of the broken sync was saved, and its row is written at the resume"
    assert account_of(tmp_path / "ckpt" / "journal.sqlite").is_exact


def test_a_run_whose_training_rank_was_on_the_node_ends_naming_it_and_is_resumed_on_the_other(
    cluster: Cluster, start: Callable[..., Running], tmp_path: Path
) -> None:
    flags = ("--actor-num-gpus-per-node", "1", "--colocate", "--num-rollout", "6")
    run = start("--actor-num-nodes", "2", *flags)
    run.wait_for("rollout 2/6", 3000)
    cluster.signal_second(signal.SIGKILL)
    assert run.end(END_S) == 1, run.output
    assert "training rank 1: its process died" in run.output, run.output
    again = start("--actor-num-nodes", "1", *flags)
    assert again.end(END_S) == 0, again.output
    assert {row["step"] for row in metrics(tmp_path)} >= set(range(6))
    assert account_of(tmp_path / "ckpt" / "journal.sqlite").is_exact
