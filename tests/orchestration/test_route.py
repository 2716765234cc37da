"""By which transport weights reach engines, and from which address: on layouts and nodes, without any of them."""

from __future__ import annotations

import pytest

from vime.config import ClusterConfig, Config, SyncConfig
from vime.errors import ConfigError
from vime.orchestration.external import ExternalFleet
from vime.orchestration.placement import Node, Placement, describe, place, plan_layout
from vime.orchestration.route import route_weights
from vime.platform.cuda import CudaPlatform
from vime.platform.machine import shared_memory_id
from vime.weight_sync import Route

HERE, THERE = Node("here", "127.0.0.1", 4), Node("there", "127.0.0.2", 4)
POSSIBLE = CudaPlatform().transports


def placed(*nodes: Node, **cluster: int | bool) -> Placement:
    settings = ClusterConfig(**cluster)
    return place(plan_layout(settings, with_engines=True), settings, nodes, HERE)


def route(placement: Placement, fleet: object = None, transport: str = "auto") -> Route:
    config = Config(sync=SyncConfig(update_weight_transport=transport))
    return route_weights(config, placement, POSSIBLE, fleet)


def external(memory: str, on_cuda: bool = True) -> ExternalFleet:
    fleet = object.__new__(ExternalFleet)
    fleet.addresses, fleet.num_readers = ("127.0.0.1:8000",), 2
    fleet.shared_memory_ids, fleet.is_on_cuda = {memory}, on_cuda
    return fleet


def test_engines_on_the_trainers_devices_read_there_on_one_node_and_on_two() -> None:
    got = route(placed(HERE, actor_num_gpus_per_node=4, rollout_num_gpus_per_engine=2, colocate=True))
    assert (got.transport, got.num_readers, got.why) == ("ipc", 4, "")
    two = placed(
        HERE, THERE, actor_num_nodes=2, actor_num_gpus_per_node=4, rollout_num_gpus_per_engine=2, colocate=True
    )
    assert (route(two).transport, route(two).num_readers) == ("ipc", 8)


def test_engines_on_devices_of_their_own_are_sent_to_by_nccl_and_the_run_says_why() -> None:
    placement = placed(HERE, actor_num_gpus_per_node=2, rollout_num_gpus=2, rollout_num_gpus_per_engine=2)
    got = route(placement)
    assert (got.transport, got.num_readers) == ("nccl", 2)
    assert describe(placement, got.transport, got.why).endswith(
        "weights travel by nccl (not ipc: an engine has a device without a training rank)"
    )
    with pytest.raises(ConfigError, match="is ipc, but an engine has a device without a training rank; use nccl or"):
        route(placement, transport="ipc")


def test_engines_on_more_devices_than_the_trainers_are_not_left_out() -> None:
    placement = placed(HERE, actor_num_gpus_per_node=1, rollout_num_gpus=2, colocate=True)
    got = route(placement)
    assert got.transport == "shm" and "not ipc" in got.why and "not nccl" in got.why


def test_external_engines_get_what_certainly_reaches_unless_the_user_knows_better() -> None:
    placement = placed(HERE, actor_num_gpus_per_node=1)
    assert route(placement, external(shared_memory_id())).transport == "shm", "they may be on the trainer's device"
    assert route(placement, external(shared_memory_id()), "nccl").transport == "nccl"
    assert route(placement, external("another machine's")).transport == "nccl"
    assert route(placement, external("another machine's", on_cuda=False)).transport == "gloo"
    with pytest.raises(ConfigError, match="is nccl, but an engine has no CUDA device apart from"):
        route(placement, external("another machine's", on_cuda=False), "nccl")
