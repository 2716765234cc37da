"""Users' functions between rollout and trainer, for the loop's tests; loaded by dotted path."""

from typing import Any

import numpy as np
import numpy.typing as npt

from vime.algo.reduce import token_loss_weights
from vime.loop.columns import sample_columns
from vime.protocols import RolloutContext
from vime.types import Sample


def with_turns(config: RolloutContext, samples: list[Sample]) -> dict[str, Any]:
    """The usual columns, one more, and no gradient for the first response token."""
    columns: dict[str, Any] = sample_columns(samples, config.config.reward.reward_key)
    starts = np.cumsum(columns["lengths"]) - [s.response_length for s in samples]
    columns["loss_mask"][starts] = 0
    columns["turns"] = [s.metadata.get("turns", 1) for s in samples]
    return columns


def without_tokens(config: RolloutContext, samples: list[Sample]) -> dict[str, Any]:
    """Leaves a column out."""
    columns: dict[str, Any] = sample_columns(samples, None)
    del columns["tokens"]
    return columns


def too_long(config: RolloutContext, samples: list[Sample]) -> dict[str, Any]:
    """A column of another length."""
    return {**sample_columns(samples, None), "turns": [1] * 7}


def squared(config: RolloutContext, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Raw rewards as they are; advantages are their squares."""
    raw = [float(s.reward) for s in samples]  # type: ignore[arg-type]
    return raw, [r**2 for r in raw]


def one_list(config: RolloutContext, samples: list[Sample]) -> list[float]:
    """Only the rewards."""
    return [1.0] * len(samples)


def not_numbers(config: RolloutContext, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """NaN for the second sample."""
    return [1.0] * len(samples), [1.0, float("nan"), *[1.0] * (len(samples) - 2)]


def token_sum(
    config: RolloutContext,
    loss_mask: npt.NDArray[Any],
    cu_seqlens: npt.NDArray[Any],
    trajectory_ids: npt.NDArray[Any],
    global_batch_size: int,
) -> npt.NDArray[Any]:
    """Dr. GRPO's reduction: a sum over tokens, divided by a constant length."""
    return loss_mask / (global_batch_size * config.config.rollout.rollout_max_response_len)


def weights_prompts(
    config: RolloutContext,
    loss_mask: npt.NDArray[Any],
    cu_seqlens: npt.NDArray[Any],
    trajectory_ids: npt.NDArray[Any],
    global_batch_size: int,
) -> npt.NDArray[Any]:
    """Gives weight to tokens that nobody sampled."""
    return token_loss_weights(np.ones_like(loss_mask), cu_seqlens, trajectory_ids, global_batch_size)
