import pytest

from vime.config import Config, RolloutConfig, SyncConfig, TrainConfig
from vime.errors import ConfigError
from vime.orchestration import sizes
from vime.platform.cpu import CpuPlatform
from vime.platform.cuda import CudaPlatform
from vime.weight_sync.verify import ProbeTolerance


def config(**rollout: int) -> Config:
    return Config(rollout=RolloutConfig(rollout_batch_size=6, n_samples_per_prompt=4, **rollout))


def test_one_optimizer_step_per_rollout_by_default() -> None:
    assert sizes.global_batch_size(config()) == 24
    assert sizes.steps_per_rollout(config()) == 1


@pytest.mark.parametrize("train", [TrainConfig(global_batch_size=8), TrainConfig(num_steps_per_rollout=3)])
def test_steps_and_batch_size_follow_from_each_other(train: TrainConfig) -> None:
    c = Config(rollout=config().rollout, train=train)
    assert sizes.global_batch_size(c) == 8
    assert sizes.steps_per_rollout(c) == 3


def test_epochs_are_rounded_up_to_whole_rollouts() -> None:
    assert sizes.number_of_rollouts(config(num_epoch=2), 10) == 4  # 20 prompts in rollouts of 6
    with pytest.raises(ConfigError, match="--num-epoch needs prompts of a known number"):
        sizes.number_of_rollouts(config(num_epoch=2), None)


def test_an_engine_may_take_as_long_over_a_bucket_as_its_transport_may() -> None:
    assert sizes.weight_call_timeout_s(Config(sync=SyncConfig(update_weight_timeout_s=3000.0))) > 2 * 3000
    assert sizes.weight_call_timeout_s(Config()) == 900


def test_the_probe_tolerance_follows_the_dtype_unless_given() -> None:
    assert sizes.probe_tolerance(config(), {"dtype": "float32"}) == ProbeTolerance(1e-4, "max")
    assert sizes.probe_tolerance(config(), {"torch_dtype": "bfloat16"}) == ProbeTolerance(0.1, "mean")
    given = Config(rollout=config().rollout, sync=SyncConfig(weight_probe_tolerance=0.5))
    assert sizes.probe_tolerance(given, {"dtype": "float32"}) == ProbeTolerance(0.5, "max")


def reach(*there: str) -> sizes.Reach:
    return sizes.Reach(**{name: name in there for name in ("same_node", "same_devices", "own_devices")})


def wants(transport: str) -> Config:
    return Config(sync=SyncConfig(update_weight_transport=transport))


def test_auto_takes_the_platforms_best_transport_that_reaches_the_engines() -> None:
    possible = CpuPlatform().transports
    assert sizes.transport_name(config(), possible, reach("same_node")) == ("shm", "")
    name, why = sizes.transport_name(config(), possible, reach())
    assert (name, why) == ("gloo", "not shm: engines are on another node than training rank 0")
    for name in ("disk", "gloo"):
        assert sizes.transport_name(wants(name), possible, reach("same_node")) == (name, "")
    with pytest.raises(ConfigError, match=r"is shm, but engines are on another node.*use gloo or disk"):
        sizes.transport_name(wants("shm"), possible, reach())


def test_on_cuda_auto_takes_ipc_on_the_trainers_devices_and_nccl_on_others_and_says_why() -> None:
    possible = CudaPlatform().transports
    assert sizes.transport_name(config(), possible, reach("same_node", "same_devices")) == ("ipc", "")
    assert sizes.transport_name(config(), possible, reach("same_devices"))[0] == "ipc", "on several nodes, too"
    for where in (reach("own_devices"), reach("own_devices", "same_node")):
        name, why = sizes.transport_name(config(), possible, where)
        assert (name, why) == ("nccl", "not ipc: an engine has a device without a training rank")
    # One engine on the trainer's device and one beside: neither will do.
    name, why = sizes.transport_name(config(), possible, reach("same_node"))
    assert name == "shm" and "not ipc: an engine has a device without" in why and "not nccl: an engine has no" in why
    for name, where in (("ipc", reach("own_devices")), ("nccl", reach("same_devices"))):
        with pytest.raises(ConfigError, match=f"is {name}, but an engine has"):
            sizes.transport_name(wants(name), possible, where)
