"""What every engine is started with, where it is to say which experts it used."""

from __future__ import annotations

from typing import Any

import pytest

from vime.config import Config, DebugConfig, RolloutConfig, TrainConfig
from vime.engine.vllm.answers import RoutingShape
from vime.orchestration.engine_settings import engine_arguments, engine_environment, routing_shape, support_limit
from vime.platform.cpu import ALIGNED, CpuPlatform
from vime.platform.cuda import CudaPlatform

GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "n_routed_experts": 300,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
}


def test_rows_are_of_every_decoder_layer_and_of_no_other() -> None:
    config = Config(train=TrainConfig(use_rollout_routing_replay=True))
    shape = routing_shape(config, GLM)
    assert shape == RoutingShape(num_layers=3, top_k=4, num_experts=300) and shape.dtype == "uint16"


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(
            train=TrainConfig(use_rollout_routing_replay=True),
            debug=DebugConfig(debug_train_only=True, load_debug_rollout_data="run"),
        ),
    ],
)
def test_engines_say_nothing_of_experts_where_nobody_asks_them(config: Config) -> None:
    assert routing_shape(config, GLM) is None


def test_engines_that_say_what_they_could_sample_may_give_log_probs_enough() -> None:
    def limits(**rollout: Any) -> tuple[int | None, Any]:
        config = Config(
            rollout=RolloutConfig(**rollout), vllm={"max_logprobs": 50} if rollout.get("rollout_top_p") else {}
        )
        return support_limit(config, GLM), engine_arguments(config, CpuPlatform(), GLM).get("max_logprobs")

    assert limits() == (None, None)
    assert limits(rollout_top_k=20) == (36, 36) and limits(rollout_top_k=2) == (18, 20)
    assert limits(rollout_top_k=20, rollout_top_p=0.9) == (36, 50)  # the user's own, which is more
    assert limits(rollout_top_k=319) == (320, 320)  # the vocabulary
    everything = Config(rollout=RolloutConfig(rollout_top_k=20), vllm={"max_logprobs": -1})
    assert engine_arguments(everything, CpuPlatform(), GLM)["max_logprobs"] == -1
    evaluation = Config(rollout=RolloutConfig(rollout_top_k=20, num_rollout=0))
    assert support_limit(evaluation, GLM) is None


def test_engines_of_an_aligned_run_are_told() -> None:
    aligned, plain = Config(train=TrainConfig(aligned=True)), Config()
    of_cpu = engine_arguments(aligned, CpuPlatform(), GLM)
    assert of_cpu["compilation_config"] == {"custom_ops": ["none"]} and of_cpu["additional_config"][ALIGNED] is True
    assert engine_environment(CudaPlatform(), ["0"], aligned=True)["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in engine_environment(CudaPlatform(), ["0"])
    assert "additional_config" not in engine_arguments(plain, CpuPlatform(), GLM)


def test_only_a_cpu_needs_an_interpreter_for_it() -> None:
    for routed_experts in (True, False):
        environment = engine_environment(CpuPlatform(), [""], routed_experts=routed_experts)
        assert ("TRITON_INTERPRET" in environment) == routed_experts
        assert "TRITON_INTERPRET" not in engine_environment(CudaPlatform(), ["0"], routed_experts=routed_experts)
