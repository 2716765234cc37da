import os
import subprocess
import sys

import pytest

from vime.config import ClusterConfig
from vime.errors import ConfigError
from vime.orchestration import ray_environment
from vime.orchestration.cluster import ray_cluster
from vime.orchestration.placement import Layout


def test_a_cluster_that_only_the_environment_names_is_neither_joined_nor_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(ConfigError, match="--ray-address auto to run on that cluster, or unset RAY_ADDRESS"):
        ray_environment.prepare(ClusterConfig())
    ray_environment.prepare(ClusterConfig(ray_address="auto"))


def test_a_long_tmpdir_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> None:
        raise OSError("validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes: /long")

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setenv("TMPDIR", "/long")
    with (
        pytest.raises(ConfigError, match=r"Ray keeps sockets in /long \(TMPDIR\).*set RAY_TMPDIR and TMPDIR"),
        ray_cluster(ClusterConfig(), Layout(1, (0,), (), False)),
    ):
        pass


@pytest.mark.ranks
def test_workers_have_the_priority_of_the_driver() -> None:
    program = """
import os
from vime.config import ClusterConfig
from vime.orchestration import ray_environment
ray_environment.prepare(ClusterConfig())
import ray
from vime.orchestration.cluster import ray_cluster
from vime.orchestration.placement import Layout
with ray_cluster(ClusterConfig(), Layout(1, (0,), (), False)):
    print("niceness", ray.get(ray.remote(lambda: os.nice(0)).remote()))
"""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_worker_niceness"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert f"niceness {os.nice(0)}" in done.stdout, done.stdout + done.stderr
