import pytest

from vime.config import Config, RolloutConfig, SyncConfig, TrainConfig
from vime.errors import ConfigError
from vime.orchestration import sizes
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


def test_auto_takes_the_platforms_best_transport_that_reaches_the_engines() -> None:
    possible = ("shm", "gloo", "disk")
    assert sizes.transport_name(config(), possible, same_node=True) == "shm"
    assert sizes.transport_name(config(), possible, same_node=False) == "gloo"
    for name in ("disk", "gloo"):
        wanted = Config(sync=SyncConfig(update_weight_transport=name))
        assert sizes.transport_name(wanted, possible, same_node=True) == name
    with pytest.raises(ConfigError, match="is shm, but engines are on another node"):
        sizes.transport_name(Config(sync=SyncConfig(update_weight_transport="shm")), possible, same_node=False)
