"""Settings of routing replay that the model or the steps of a rollout have no use for."""

from typing import Any

import pytest

from vime.config import AlgoConfig, Config, RolloutConfig, TrainConfig
from vime.config.validate_routing import check_routing_replay

MOE = {"num_layers": 6, "num_moe_experts": 8}


def problems(shape: dict[str, Any] = MOE, algo: AlgoConfig = AlgoConfig(), **train: Any) -> list[str]:  # noqa: B008
    rollout = RolloutConfig(rollout_batch_size=8, n_samples_per_prompt=4)
    config = Config(algo=algo, rollout=rollout, train=TrainConfig(**{"use_routing_replay": True, **train}))
    return list(check_routing_replay(config, shape))


def test_several_steps_of_a_model_with_experts_may_replay_their_own_choice() -> None:
    assert not problems(num_steps_per_rollout=2) and not problems(global_batch_size=16)
    assert not problems(shape={}, global_batch_size=16)
    assert not problems(use_routing_replay=False, log_probs_max_tokens_per_gpu=9)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (problems(shape={"num_layers": 6}, num_steps_per_rollout=2), "this one has none"),
        (problems(), "a rollout has one step"),
        (problems(global_batch_size=32), "a rollout has one step"),
        (problems(algo=AlgoConfig(loss_type="sft_loss")), "sft_loss has none"),
        (problems(num_steps_per_rollout=2, log_probs_max_tokens_per_gpu=99), "--log-probs-max-tokens-per-gpu 99"),
    ],
)
def test_what_would_replay_nothing_is_named(found: list[str], message: str) -> None:
    (problem,) = found
    assert message in problem and "--use-routing-replay" in problem
