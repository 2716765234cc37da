import pytest

from vime.config import ClusterConfig
from vime.config.critic_ranks import CriticRanks
from vime.errors import ConfigError
from vime.orchestration.cluster import in_device_order
from vime.orchestration.engine_settings import engine_environment
from vime.orchestration.placement import Node, Placement, place, plan_layout
from vime.platform.cpu import CpuPlatform
from vime.platform.cuda import CudaPlatform


def test_separate_devices_come_after_the_trainers() -> None:
    layout = plan_layout(ClusterConfig(actor_num_gpus_per_node=2, rollout_num_gpus=2), with_engines=True)
    assert layout.trainer_devices == (0, 1)
    assert layout.engine_devices == ((2,), (3,))
    assert (layout.num_devices, layout.shared) == (4, False)


def test_colocated_engines_default_to_the_trainers_devices() -> None:
    layout = plan_layout(
        ClusterConfig(actor_num_gpus_per_node=4, colocate=True, rollout_num_gpus_per_engine=2), with_engines=True
    )
    assert layout.engine_devices == ((0, 1), (2, 3))
    assert (layout.num_devices, layout.shared) == (4, True)


def test_colocated_engines_may_use_more_devices_than_the_trainer() -> None:
    layout = plan_layout(ClusterConfig(colocate=True, rollout_num_gpus=3), with_engines=True)
    assert layout.trainer_devices == (0,)
    assert layout.num_devices == 3


def test_an_engine_of_its_own_devices_has_as_many_as_it_needs_unless_told() -> None:
    layout = plan_layout(ClusterConfig(actor_num_gpus_per_node=2, rollout_num_gpus_per_engine=4), with_engines=True)
    assert layout.engine_devices == ((2, 3, 4, 5),)


def test_an_engine_of_several_devices_is_told_their_numbers_and_works_in_processes_of_its_own() -> None:
    cuda, cpu = CudaPlatform(), CpuPlatform()
    assert engine_environment(cuda, ["4", "5"])["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert cuda.engine_arguments(64, 2)["distributed_executor_backend"] == "mp"
    assert "distributed_executor_backend" not in cuda.engine_arguments(64)
    assert "CUDA_VISIBLE_DEVICES" not in engine_environment(cpu, ["", ""])
    assert [cpu.engine_arguments(64, n)["distributed_executor_backend"] for n in (1, 2)] == ["uni", "mp"]


def test_a_run_that_generates_nothing_has_no_engines() -> None:
    layout = plan_layout(ClusterConfig(), with_engines=False)
    assert layout.engine_devices == ()
    assert layout.num_devices == 1


def test_engines_that_do_not_divide_the_devices_are_refused_with_the_values() -> None:
    with pytest.raises(ConfigError, match="--rollout-num-gpus is 3, which 2 devices per engine"):
        plan_layout(ClusterConfig(rollout_num_gpus=3, rollout_num_gpus_per_engine=2), with_engines=True)


def test_a_run_without_a_trainer_has_as_many_engines_as_one_with_it() -> None:
    separate = plan_layout(ClusterConfig(actor_num_gpus_per_node=2), with_engines=True, with_trainer=False)
    assert (separate.trainer_devices, separate.engine_devices, separate.num_devices) == ((), ((0,),), 1)
    shared = plan_layout(ClusterConfig(actor_num_gpus_per_node=2, colocate=True), with_engines=True, with_trainer=False)
    assert (shared.engine_devices, shared.num_devices, shared.shared) == (((0,), (1,)), 2, False)
    assert plan_layout(ClusterConfig(), with_engines=False, with_trainer=False).num_devices == 0


def test_a_critic_of_its_own_devices_comes_behind_all_others() -> None:
    own = CriticRanks(nodes=2, per_node=2)
    cluster = ClusterConfig(actor_num_gpus_per_node=2, rollout_num_gpus=1)
    separate = plan_layout(cluster, with_engines=True, critic=own)
    assert separate.trainer_devices == (0, 1) and separate.engine_devices == ((2,),)
    assert separate.critic_devices == ((3, 4), (5, 6)) and separate.critic_ranks == (3, 4, 5, 6)
    assert separate.num_devices == 7
    shared = plan_layout(ClusterConfig(actor_num_gpus_per_node=2, colocate=True), with_engines=True, critic=own)
    assert shared.engine_devices == ((0,), (1,)) and shared.critic_ranks == (2, 3, 4, 5)
    alone = plan_layout(cluster, with_engines=False, critic=own)
    assert alone.critic_ranks == (2, 3, 4, 5) and alone.training_devices == (0, 1, 2, 3, 4, 5)
    assert plan_layout(cluster, with_engines=True, with_trainer=False, critic=own).critic_devices == ()


def node(last: int, devices: int) -> Node:
    return Node(f"id-{last}", f"10.0.0.{last}", devices)


def placed(cluster: ClusterConfig, *nodes: Node) -> Placement:
    return place(plan_layout(cluster, with_engines=True), cluster, nodes, nodes[0])


def homes(placement: Placement) -> list[int]:
    return [int(home.address.rpartition(".")[2]) for home in placement.nodes]


def test_nodes_are_filled_in_the_order_of_their_addresses_the_trainer_first() -> None:
    cluster = ClusterConfig(actor_num_nodes=2, actor_num_gpus_per_node=2, rollout_num_gpus=3)
    placement = placed(cluster, node(10, 4), node(9, 2), node(2, 3))
    assert homes(placement) == [2, 2, 9, 9, 2, 10, 10]
    assert [placement.ranks_on_node(device) for device in range(4)] == [2, 2, 2, 2]
    assert not placement.are_on_one_node(placement.layout.trainer_devices)
    assert not placement.engines_share_the_senders_node
    assert placement.host(2) == "10.0.0.9"


def test_trainer_and_engines_on_a_node_each_when_a_node_has_one_device() -> None:
    placement = placed(ClusterConfig(), node(1, 1), node(2, 1))
    assert homes(placement) == [1, 2]
    assert placement.are_on_one_node(placement.layout.trainer_devices)
    assert not placement.engines_share_the_senders_node
    assert [placement.host(device) for device in (0, 1)] == ["10.0.0.1", "10.0.0.2"]


def test_a_run_on_the_drivers_node_alone_stays_on_the_loopback() -> None:
    placement = placed(ClusterConfig(rollout_num_gpus=2), node(1, 3), node(2, 3))
    assert homes(placement) == [1, 1, 1]
    assert placement.engines_share_the_senders_node
    assert placement.host(0) == "127.0.0.1"
    elsewhere = place(placement.layout, ClusterConfig(), [node(2, 3)], node(1, 0))
    assert elsewhere.host(0) == "10.0.0.2"


def test_colocated_engines_are_where_their_ranks_are() -> None:
    placement = placed(ClusterConfig(actor_num_nodes=2, colocate=True), node(1, 1), node(2, 1))
    assert homes(placement) == [1, 2]
    assert placement.layout.engine_devices == ((0,), (1,))


def test_a_critic_gets_nodes_before_the_engines_and_may_share_one_with_the_trainer() -> None:
    cluster = ClusterConfig(actor_num_gpus_per_node=2)
    layout = plan_layout(cluster, with_engines=True, critic=CriticRanks(nodes=2, per_node=1))
    placement = place(layout, cluster, [node(1, 3), node(2, 2)], node(1, 0))
    assert homes(placement) == [1, 1, 2, 1, 2]  # trainer, engine, critic
    assert [placement.ranks_on_node(device) for device in range(5)] == [3, 3, 1, 3, 1]
    assert not placement.are_on_one_node(layout.critic_ranks)
    assert placement.are_on_one_node(layout.trainer_devices)
    with pytest.raises(ConfigError, match=r"the critic needs 2 node\(s\) with 1 device\(s\) each .*10.0.0.1: 4"):
        place(layout, cluster, [node(1, 4)], node(1, 0))
    with pytest.raises(ConfigError, match=r"\(2 to train, 1 for engines, 2 for the critic\)"):
        place(layout, cluster, [node(1, 3), node(2, 1)], node(1, 0))


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (ClusterConfig(actor_num_nodes=2, actor_num_gpus_per_node=2), r"needs 2 node\(s\) with 2 device\(s\) each.*10"),
        (ClusterConfig(rollout_num_gpus=4), r"needs 5 devices \(1 to train, 4 for engines\), but Ray has 10.0.0.1: 2"),
        (
            ClusterConfig(actor_num_nodes=2, colocate=True, rollout_num_gpus_per_engine=2),
            "an engine of 2 devices .* would lie on two nodes",
        ),
    ],
)
def test_a_cluster_that_is_too_small_is_described(cluster: ClusterConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        placed(cluster, node(1, 2), node(2, 1))


def test_the_devices_of_a_node_are_in_the_order_of_their_numbers() -> None:
    assert in_device_order(["a", "b", "a", "b", "a"], ["10", "1", "2", "0", "0"]) == (4, 3, 2, 1, 0)
