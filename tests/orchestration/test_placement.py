import pytest

from vime.config import ClusterConfig
from vime.errors import ConfigError
from vime.orchestration.placement import plan_layout


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
