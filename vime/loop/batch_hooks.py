"""Users' functions between the rollout and the trainer: columns, rewards, the reduction of the policy loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vime.config import hook_table
from vime.config.hooks import UserFunction
from vime.loop.columns import checked_columns
from vime.protocols import RolloutContext
from vime.types import Sample


@dataclass(frozen=True, slots=True)
class BatchHooks:
    """The functions of a run that make_train_batch calls, where it has them."""

    context: RolloutContext
    convert: UserFunction | None
    post_process: UserFunction | None
    reducer: UserFunction | None

    @classmethod
    def load(cls, context: RolloutContext) -> BatchHooks:
        """Those that the settings name. Raises: ConfigError."""
        config = context.config
        return cls(
            context,
            hook_table.load(config, "rollout.custom_convert_samples_to_train_data_path"),
            hook_table.load(config, "reward.custom_reward_post_process_path"),
            hook_table.load(config, "algo.custom_pg_loss_reducer_function_path"),
        )

    def columns(self, samples: list[Sample]) -> tuple[dict[str, npt.NDArray[Any]], dict[str, npt.NDArray[Any]]] | None:
        """Known and further columns by --custom-convert-samples-to-train-data-path; None if there is none."""
        if self.convert is None:
            return None
        return checked_columns(self.convert, self.convert(self.context, samples))

    def rewards(
        self, samples: list[Sample], num_rows: int
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None:
        """[B] raw rewards and [B] advantages by --custom-reward-post-process-path; None if there is none."""
        if self.post_process is None:
            return None
        result = self.post_process(self.context, samples)
        if not isinstance(result, tuple) or len(result) != 2:
            raise self.post_process.refuse(result, "a tuple of two lists, (raw_rewards, rewards)")
        raw, rewards = (
            _numbers(self.post_process, name, value, (num_rows,))
            for name, value in zip(("raw_rewards", "rewards"), result, strict=True)
        )
        return raw, rewards

    def pg_weights(
        self,
        loss_mask: npt.NDArray[np.uint8],
        cu_seqlens: npt.NDArray[np.int64],
        trajectory_ids: npt.NDArray[np.int64],
        global_batch_size: int,
    ) -> npt.NDArray[np.float32] | None:
        """[T] weights of the policy loss by --custom-pg-loss-reducer-function-path; None if there is none."""
        if self.reducer is None:
            return None
        result = self.reducer(self.context, loss_mask, cu_seqlens, trajectory_ids, global_batch_size)
        weights = _numbers(self.reducer, "weights", result, loss_mask.shape)
        if np.any(weights[loss_mask == 0]):
            raise self.reducer.broken("gave weight to tokens under mask 0; multiply with loss_mask")
        return weights.astype(np.float32)


def _numbers(function: UserFunction, name: str, value: Any, shape: Sequence[int]) -> npt.NDArray[np.float64]:
    try:
        numbers = np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise function.refuse(value, f"numbers as {name}") from error
    if numbers.shape != tuple(shape):
        raise function.broken(f"gave {name} of shape {numbers.shape}; {tuple(shape)} is expected")
    usable = np.abs(numbers) <= np.finfo(np.float32).max
    if not usable.all():
        raise function.broken(
            f"gave {name} with NaN, infinity or what float32 cannot hold at position {int(np.argmin(usable))}"
        )
    return numbers
