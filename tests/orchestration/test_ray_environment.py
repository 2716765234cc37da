import pytest

from vime.config import ClusterConfig
from vime.errors import ConfigError
from vime.orchestration import ray_environment


def test_a_cluster_that_only_the_environment_names_is_neither_joined_nor_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(ConfigError, match="--ray-address auto to run on that cluster, or unset RAY_ADDRESS"):
        ray_environment.prepare(ClusterConfig())
    ray_environment.prepare(ClusterConfig(ray_address="auto"))
