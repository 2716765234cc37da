"""Cross-checks of routing replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vime.config import Config


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
