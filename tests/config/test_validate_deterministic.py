"""What --deterministic refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vime.config import ClusterConfig, Config, RolloutConfig, TrainConfig
from vime.config.validate_deterministic import check_deterministic


def problems(config: Config, *, overlapped: bool = False) -> list[str]:
    return list(check_deterministic(config, overlapped=overlapped))


def rollout(**settings: object) -> Config:
    return Config(rollout=RolloutConfig(deterministic=True, **settings))  # type: ignore[arg-type]


def test_a_plain_synchronous_run_may_be_deterministic_and_others_need_not() -> None:
    assert problems(rollout()) == []
    assert problems(Config(rollout=RolloutConfig(partial_rollout=True)), overlapped=True) == []


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (rollout(over_sampling_batch_size=8), "--over-sampling-batch-size"),
        (rollout(partial_rollout=True), "--partial-rollout"),
        (rollout(rollout_request_seeds=False), "--no-rollout-request-seeds"),
        (rollout(custom_generate_function_path="a.b"), "--custom-generate-function-path"),
        (rollout(rollout_function_path="a.b"), "--rollout-function-path a.b"),
        (replace(rollout(), cluster=ClusterConfig(rollout_num_gpus=2)), "2 engines share requests"),
        (
            replace(rollout(), cluster=ClusterConfig(rollout_external_engine_addrs=["h:1"])),
            "--rollout-external-engine-addrs",
        ),
        (replace(rollout(), train=TrainConfig(use_rollout_routing_replay=True)), "--use-rollout-routing-replay"),
        (replace(rollout(), vllm={"enable_prefix_caching": True}), "--vllm-enable-prefix-caching"),
        (replace(rollout(), vllm={"scheduler_cls": "a.b"}), "--vllm-scheduler-cls"),
    ],
)
def test_what_leaves_the_batches_to_chance_is_refused(config: Config, word: str) -> None:
    (problem,) = problems(config)
    assert problem.startswith("--deterministic: ") and word in problem


def test_generating_beside_training_is_refused() -> None:
    (problem,) = problems(rollout(), overlapped=True)
    assert "train_async.py" in problem
