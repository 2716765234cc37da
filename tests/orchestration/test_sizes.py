import pytest

from vime.config import Config, RolloutConfig, SyncConfig, TrainConfig
from vime.errors import ConfigError
from vime.orchestration import sizes


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


def test_engines_serve_in_the_dtype_that_the_trainer_trains_in() -> None:
    for megatron, checkpoint, want in (
        ({}, {"dtype": "bfloat16"}, "bfloat16"),
        ({}, {}, "float32"),
        ({"bf16": True}, {"dtype": "float32"}, "bfloat16"),
        ({"bf16": False}, {"dtype": "bfloat16"}, "float32"),
    ):
        assert sizes.dtype_name(Config(megatron=megatron), checkpoint) == want, (megatron, checkpoint)


def test_the_probe_tolerance_follows_the_dtype_unless_given() -> None:
    assert sizes.probe_tolerance(config(), {"dtype": "float32"}) == 1e-4
    assert sizes.probe_tolerance(config(), {"torch_dtype": "bfloat16"}) == 0.25
    given = Config(rollout=config().rollout, sync=SyncConfig(weight_probe_tolerance=0.5))
    assert sizes.probe_tolerance(given, {"dtype": "float32"}) == 0.5


def test_auto_takes_the_platforms_best_transport() -> None:
    assert sizes.transport_name(config(), ("shm", "disk")) == "shm"
    assert sizes.transport_name(Config(sync=SyncConfig(update_weight_transport="disk")), ("shm", "disk")) == "disk"


def test_the_data_parallel_size_is_what_model_parallel_ranks_leave() -> None:
    assert sizes.data_parallel_size(config(), 4) == 4
    assert sizes.data_parallel_size(Config(megatron={"tensor_model_parallel_size": 2}), 4) == 2
