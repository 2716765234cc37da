"""PPO's critic: what contradicts it is refused before anything starts."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from vime.config import AlgoConfig, CheckpointConfig, ClusterConfig, Config, CriticConfig, RolloutConfig, TrainConfig
from vime.config.critic_ranks import CriticRanks, critic_layout, critic_ranks
from vime.config.ranges import check_ranges
from vime.config.unread import unread_settings
from vime.config.validate_critic import check_critic as check_critic_of

PPO = Config(algo=AlgoConfig(advantage_estimator="ppo"), rollout=RolloutConfig(num_rollout=10))


def check_critic(config: Config, shape: Mapping[str, Any] = MappingProxyType({})) -> Iterator[str]:
    return check_critic_of(config, shape, on_cpu=True)


def critic(**settings: Any) -> Config:
    return replace(PPO, critic=CriticConfig(**settings))


def test_the_defaults_are_right() -> None:
    assert list(check_critic(PPO)) == [] == list(check_ranges(PPO))


def test_a_checkpoint_without_config_is_named(tmp_path: Path) -> None:
    (problem,) = check_critic(critic(critic_load=str(tmp_path)))
    assert problem.startswith(f"--critic-load {tmp_path} holds no config.json")
    (tmp_path / "config.json").write_text("{}")
    assert list(check_critic(critic(critic_load=str(tmp_path)))) == []


def test_the_policy_must_come_to_be_trained() -> None:
    (problem,) = check_critic(critic(num_critic_only_steps=10))
    assert problem.startswith("--num-critic-only-steps is 10, so that none of the 10 rollouts")
    assert list(check_critic(critic(num_critic_only_steps=9))) == []


@pytest.mark.parametrize(
    ("metric", "is_refused"),
    [
        ("train/loss", True),
        ("train/grad_norm", True),
        ("train/critic-value_loss", False),
        ("train/train_rollout_logprob_abs_diff", False),
        ("rollout/raw_reward", False),
    ],
)
def test_a_stop_metric_must_be_there_while_the_critic_is_trained_alone(metric: str, is_refused: bool) -> None:
    config = replace(critic(num_critic_only_steps=2), train=TrainConfig(stop_metric=metric, stop_below=0.1))
    assert [p.split(",")[0] for p in check_critic(config)] == [f"--stop-metric is {metric}"] * is_refused
    best = replace(critic(num_critic_only_steps=2), checkpoint=CheckpointConfig(keep_best_checkpoint=f"{metric}:min"))
    assert [p.split(",")[0] for p in check_critic(best)] == [f"--keep-best-checkpoint is {metric}"] * is_refused
    assert list(check_critic(replace(config, critic=CriticConfig()))) == []


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ({}, None),
        ({"critic_num_gpus_per_node": 2}, CriticRanks(1, 2)),
        ({"critic_num_nodes": 3}, CriticRanks(3, 4)),
        ({"critic_num_nodes": 2, "critic_num_gpus_per_node": 1}, CriticRanks(2, 1)),
    ],
)
def test_a_critic_has_devices_of_its_own_where_they_are_given(
    settings: dict[str, Any], ranks: CriticRanks | None
) -> None:
    config = replace(critic(**settings), cluster=ClusterConfig(actor_num_gpus_per_node=4, ray_address="x:1"))
    assert critic_ranks(config) == ranks
    assert critic_ranks(replace(config, algo=AlgoConfig())) is None
    assert list(check_critic(config)) == []


def test_the_critics_ranks_are_divided_as_the_policys_unless_told() -> None:
    megatron = {"tensor_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "lr": 1e-3}
    assert critic_layout(megatron, CriticConfig()) == megatron
    own = critic_layout(
        megatron, CriticConfig(critic_tensor_model_parallel_size=1, critic_pipeline_model_parallel_size=2)
    )
    assert own == {
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
        "pipeline_model_parallel_size": 2,
        "lr": 1e-3,
    }
    assert critic_layout({}, CriticConfig(critic_tensor_model_parallel_size=4))["sequence_parallel"]


def test_a_layout_that_the_critics_ranks_cannot_have_is_named() -> None:
    config = replace(critic(critic_num_gpus_per_node=3), megatron={"tensor_model_parallel_size": 2})
    (problem,) = check_critic(config, {"num_attention_heads": 4})
    assert problem.startswith("the critic's 3 ranks of its own") and "does not divide the 3 training ranks" in problem
    own = replace(config, critic=replace(config.critic, critic_tensor_model_parallel_size=3))
    (problem,) = check_critic(own, {"num_attention_heads": 4})
    assert "does not divide the model's 4 attention heads" in problem


def test_a_critic_on_several_nodes_needs_a_cluster() -> None:
    (problem,) = check_critic(critic(critic_num_nodes=2))
    assert problem.startswith("--critic-num-nodes is 2, but the Ray that is started here has one node")


def test_a_layout_of_its_own_needs_devices_of_its_own() -> None:
    (problem,) = check_critic(critic(critic_context_parallel_size=2))
    assert problem.startswith("--critic-context-parallel-size is of a critic on devices of its own")


def test_a_warm_up_must_end_before_the_decay() -> None:
    config = replace(critic(critic_lr_warmup_iters=5), train=TrainConfig(lr_decay_iters=5))
    (problem,) = check_critic(config)
    assert problem == "--critic-lr-warmup-iters is 5, not below --lr-decay-iters 5"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lambd": 1.5}, "--lambd is 1.5, but may be at most 1"),
        ({"lambd": -0.1}, "--lambd is -0.1, but must be at least 0"),
        ({"value_clip": -1.0}, "--value-clip is -1.0, but must be at least 0"),
        ({"value_loss_coef": 0.0}, "--value-loss-coef is 0.0, but must be above 0"),
        ({"num_critic_only_steps": -1}, "--num-critic-only-steps is -1, but must be at least 0"),
        ({"critic_lr": -1e-5}, "--critic-lr is -1e-05, but must be at least 0"),
    ],
)
def test_numbers_outside_their_range_are_named(settings: dict[str, Any], words: str) -> None:
    (problem,) = check_ranges(critic(**settings))
    assert problem.startswith(words)


def test_no_setting_of_a_critic_is_read_without_one() -> None:
    given = [f"critic.{field.name}" for field in fields(CriticConfig)]
    assert len(list(unread_settings(Config(), given))) == len(given)
    assert list(unread_settings(PPO, given)) == []


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("algo.disable_rewards_normalization", "ppo takes rewards as they are"),
        ("algo.custom_advantage_function_path", "ppo makes advantages of its critic's values"),
        ("algo.disable_grpo_std_normalization", "the estimator does not divide by a group's std"),
    ],
)
def test_what_shapes_other_advantages_is_refused(setting: str, words: str) -> None:
    (problem,) = unread_settings(PPO, [setting])
    assert words in problem


def test_rewards_may_come_from_a_function_and_the_kl_is_still_taken_from_them() -> None:
    config = replace(PPO, reward=replace(PPO.reward, custom_reward_post_process_path="a.b"))
    assert list(unread_settings(config, ["algo.kl_coef", "algo.normalize_advantages", "algo.gamma"])) == []
    (problem,) = unread_settings(config, ["algo.overlong_buffer_len"])
    assert "--custom-reward-post-process-path makes the rewards" in problem
