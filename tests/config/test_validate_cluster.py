"""Layouts, transports and external engines that cannot be."""

from pathlib import Path
from typing import Any

import pytest

from vime.config import ClusterConfig, Config, SyncConfig
from vime.config.validate_cluster import check_cluster, key_file_problem


def problems(config: Config, devices: int | None = None) -> list[str]:
    return list(check_cluster(config, platform="cpu", transports=("shm", "gloo", "disk"), devices=devices))


def external(tmp_path: Path, *addresses: str, key: str = "k", mode: int = 0o600, **more: Any) -> Config:
    path = tmp_path / "key"
    path.write_text(key)
    path.chmod(mode)
    cluster = ClusterConfig(
        rollout_external_engine_addrs=list(addresses), rollout_external_engine_key_file=str(path), **more
    )
    return Config(cluster=cluster, vllm={"enforce_eager": True} if more else {})


def test_several_nodes_need_a_cluster_to_join() -> None:
    assert "the Ray that is started here has one node" in problems(Config(cluster=ClusterConfig(actor_num_nodes=2)))[0]
    assert problems(Config(cluster=ClusterConfig(actor_num_nodes=2, ray_address="10.0.0.1:6379"))) == []


def test_engines_beside_the_trainer_need_devices_of_their_own_unless_they_take_turns() -> None:
    assert "the run needs 2 devices (1 to train, 1 for engines), but this node has 1" in problems(Config(), 1)[0]
    assert problems(Config(cluster=ClusterConfig(colocate=True)), 1) == []


def test_a_transport_that_the_platform_lacks_is_refused() -> None:
    config = Config(sync=SyncConfig(update_weight_transport="gloo"))
    assert problems(config) == []
    (problem,) = check_cluster(config, platform="x", transports=("shm",), devices=None)
    assert "--update-weight-transport is gloo, which the x platform cannot do" in problem


def test_external_engines_that_are_named_right_are_no_problem(tmp_path: Path) -> None:
    assert problems(external(tmp_path, "10.0.0.5:8000", "engine-2:8000"), devices=1) == []


@pytest.mark.parametrize("address", ["10.0.0.5", ":8000", "http://10.0.0.5:8000", "10.0.0.5:x", "10.0.0.5:0"])
def test_an_address_that_is_none_is_shown(tmp_path: Path, address: str) -> None:
    (problem,) = problems(external(tmp_path, address))
    assert repr(address) in problem and "is not host:port" in problem


def test_what_external_engines_do_not_read_is_refused_all_at_once(tmp_path: Path) -> None:
    found = "\n".join(problems(external(tmp_path, "a:1", "a:1", colocate=True)))
    for part in ("names a:1 twice", "--colocate shares", "--vllm-enforce-eager is given, but external engines"):
        assert part in found
    missing = Config(cluster=ClusterConfig(rollout_external_engine_addrs=["a:1"]))
    assert "--rollout-external-engine-key-file is required" in problems(missing)[0]


def test_a_key_file_must_be_private_and_hold_a_key(tmp_path: Path) -> None:
    assert "is not a file" in (key_file_problem(tmp_path / "none") or "")
    assert "mode 0644" in problems(external(tmp_path, "a:1", mode=0o644))[0]
    assert "is empty" in problems(external(tmp_path, "a:1", key=" \n"))[0]
