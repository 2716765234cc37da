"""--use-rollout-routing-replay: what it cannot be used with is refused before anything starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vime.config import AlgoConfig, CheckpointConfig, ClusterConfig, Config, DebugConfig, RolloutConfig, TrainConfig
from vime.config.modes import engines_return_experts
from vime.config.unread import unread_settings
from vime.config.validate_routing import check_rollout_routing_replay

MOE: dict[str, Any] = {"num_moe_experts": 8}
R3 = Config(checkpoint=CheckpointConfig(hf_checkpoint="model"), train=TrainConfig(use_rollout_routing_replay=True))
ON_A_CPU = "vLLM 0.26.0 does so on CUDA alone"


def problems(config: Config, shape: dict[str, Any] = MOE, engine_problem: str | None = None) -> list[str]:
    return list(check_rollout_routing_replay(config, shape, engine_problem))


def test_a_mixture_of_experts_on_engines_that_can_is_right() -> None:
    assert problems(R3) == [] == problems(replace(R3, vllm={"tensor_parallel_size": 2, "enable_prefix_caching": True}))
    assert engines_return_experts(R3)


def test_without_the_flag_nothing_is_looked_at() -> None:
    plain = replace(R3, train=TrainConfig(), vllm={"decode_context_parallel_size": 2})
    assert problems(plain, {"num_moe_experts": None}, ON_A_CPU) == []
    assert not engines_return_experts(plain)


def test_a_dense_model_has_nothing_to_replay() -> None:
    (problem,) = problems(R3, {"num_moe_experts": None})
    assert problem == "--use-rollout-routing-replay replays experts, but the checkpoint model has none; drop it"
    assert problems(R3, {}) == []  # said elsewhere: it could not be read


@pytest.mark.parametrize(
    ("vllm", "words"),
    [
        ({"decode_context_parallel_size": 4}, "--vllm-decode-context-parallel-size is 4, but"),
        ({"prefill_context_parallel_size": 2}, "--vllm-prefill-context-parallel-size is 2, but"),
        (
            {"enable_prefix_caching": False},
            "--no-vllm-enable-prefix-caching: vLLM keeps routed experts with that cache",
        ),
        ({"kv_transfer_config": {"kv_connector": "NixlConnector"}}, "--vllm-kv-transfer-config moves the cache"),
        ({"speculative_config": {"enable_adaptive_verification": True}}, "--vllm-speculative-config has"),
    ],
)
def test_settings_at_which_engines_return_no_experts_are_named(vllm: dict[str, Any], words: str) -> None:
    (problem,) = problems(replace(R3, vllm=vllm))
    assert problem.startswith(words) and "--use-rollout-routing-replay" in problem


def test_engines_that_cannot_are_named_where_they_would_be_asked() -> None:
    assert problems(R3, engine_problem=ON_A_CPU) == [
        f"--use-rollout-routing-replay needs engines that return routed experts: {ON_A_CPU}"
    ]
    replayed = replace(R3, debug=DebugConfig(debug_train_only=True, load_debug_rollout_data="run"))
    assert problems(replayed, engine_problem=ON_A_CPU) == [] and not engines_return_experts(replayed)
    external = ClusterConfig(rollout_external_engine_addrs=["10.0.0.5:8000"])
    assert problems(replace(R3, cluster=external), engine_problem=ON_A_CPU) == []


def test_rollouts_alone_are_made_with_their_experts_for_a_later_training() -> None:
    assert engines_return_experts(replace(R3, debug=DebugConfig(debug_rollout_only=True)))


def test_supervised_training_and_evaluation_route_freely() -> None:
    (problem,) = problems(replace(R3, algo=AlgoConfig(loss_type="sft_loss")))
    assert "asks no engine" in problem
    evaluated = replace(R3, rollout=RolloutConfig(num_rollout=0))
    assert not engines_return_experts(evaluated)
    (problem,) = unread_settings(evaluated, frozenset({"train.use_rollout_routing_replay"}))
    assert "--use-rollout-routing-replay" in problem and "--num-rollout 0 trains nothing" in problem
