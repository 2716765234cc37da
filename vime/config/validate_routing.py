"""Cross-checks of routing replay: of the policy's own choice of experts, and of the engines'."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vime.config import Config
from vime.config.modes import engines_return_experts

_FLAG = "--use-rollout-routing-replay"
# Settings of vLLM at which neither release returns routed experts if they are above 1. (Nor does an engine of several
# stages, which vime never starts.)
_AT_MOST_ONE = {
    "decode_context_parallel_size": "context-parallel ranks of an engine",
    "prefill_context_parallel_size": "context-parallel ranks of an engine",
}


def check_routing_replay(config: Config, shape: Mapping[str, Any]) -> Iterator[str]:
    """What --use-routing-replay needs of the model and of the steps.

    Args: shape: the checkpoint's architecture in Megatron's names; empty when it could not be read.
    """
    train = config.train
    if not train.use_routing_replay:
        return
    flag = "--use-routing-replay"
    if shape and not shape.get("num_moe_experts"):
        yield f"{flag} is for models with experts, and this one has none; drop it"
    if config.algo.loss_type == "sft_loss":
        yield f"{flag} replays what an old policy chose, and --loss-type sft_loss has none; drop it"
    elif _steps(config) == 1:
        yield (
            f"{flag} has the optimizer steps of a rollout replay what the policy chose before the first of them, but a "
            "rollout has one step, which chooses the same; drop it, or set --num-steps-per-rollout or a smaller "
            "--global-batch-size"
        )
    if train.log_probs_max_tokens_per_gpu is not None:
        yield (
            f"{flag} records micro-batch by micro-batch what is trained on later, but --log-probs-max-tokens-per-gpu "
            f"{train.log_probs_max_tokens_per_gpu} makes others for the old policy's forward pass; drop one of the two"
        )


def _steps(config: Config) -> int:
    """Optimizer steps of a rollout, as far as sizes that fit each other say; others are reported elsewhere."""
    train, rollout = config.train, config.rollout
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    if train.num_steps_per_rollout is not None:
        return train.num_steps_per_rollout
    return samples // train.global_batch_size if train.global_batch_size else 1


def check_rollout_routing_replay(config: Config, shape: Mapping[str, Any], engine_problem: str | None) -> Iterator[str]:
    """What is wrong with replaying the engines' experts.

    Args:
        shape: the checkpoint's architecture in Megatron's names; empty when it could not be read.
        engine_problem: why the engines of this machine cannot return routed experts, whatever the settings.
    """
    if not config.train.use_rollout_routing_replay:
        return
    if shape and not shape.get("num_moe_experts"):
        yield f"{_FLAG} replays experts, but the checkpoint {config.checkpoint.hf_checkpoint} has none; drop it"
    if config.algo.loss_type == "sft_loss":
        yield f"{_FLAG} replays what engines routed, but --loss-type sft_loss asks no engine; drop it"
    if not engines_return_experts(config) or config.cluster.rollout_external_engine_addrs:
        return
    if engine_problem is not None:
        yield f"{_FLAG} needs engines that return routed experts: {engine_problem}"
    yield from _engine_settings(config.vllm)


def _engine_settings(vllm: Mapping[str, Any]) -> Iterator[str]:
    for name, what in _AT_MOST_ONE.items():
        if (value := vllm.get(name) or 1) > 1:
            yield (
                f"--vllm-{name.replace('_', '-')} is {value}, but vLLM returns routed experts only without {what}; "
                f"use 1 (more devices: --rollout-num-gpus-per-engine), or drop {_FLAG}"
            )
    if vllm.get("enable_prefix_caching") is False:
        yield f"--no-vllm-enable-prefix-caching: vLLM keeps routed experts with that cache; leave it on with {_FLAG}"
    if vllm.get("kv_transfer_config") is not None:
        yield (
            "--vllm-kv-transfer-config moves the cache between engines, and routed experts do not travel with it; drop "
            f"it, or {_FLAG}"
        )
    if (vllm.get("speculative_config") or {}).get("enable_adaptive_verification"):
        yield (
            "--vllm-speculative-config has enable_adaptive_verification, with which vLLM returns no routed experts; "
            f"leave it out, or drop {_FLAG}"
        )
