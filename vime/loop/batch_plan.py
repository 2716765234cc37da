"""How a batch is cut into optimizer steps and micro-batches of data-parallel ranks, from the settings."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vime.config import TrainConfig
from vime.config.parallel import ParallelSizes
from vime.data.packing import plan_steps
from vime.errors import ConfigError
from vime.models import ModelSettings
from vime.models.flops import sample_flops
from vime.types import StepPlan, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlanner:
    """For one group of ranks. Which samples make a step does not depend on it, only how ranks share them."""

    train: TrainConfig
    dp_size: int
    """Data-parallel ranks."""
    sizes: ParallelSizes
    """Of the parallel dimensions."""
    model: ModelSettings | None
    """Whose FLOPs balance the ranks; None: tokens do."""
    global_batch_size: int
    """Trajectories per optimizer step."""

    def plan(
        self,
        lengths: npt.NDArray[np.int64],
        mask: npt.NDArray[np.uint8],
        cu_seqlens: npt.NDArray[np.int64],
        trajectory_ids: npt.NDArray[np.int64],
    ) -> tuple[StepPlan, ...]:
        """The steps of a batch; arguments as `vime.types.TrainBatch` has them. Raises: DataError, ConfigError."""
        train = self.train
        if train.use_dynamic_batch_size and train.max_tokens_per_gpu is None:
            raise ConfigError("--use-dynamic-batch-size fills micro-batches up to --max-tokens-per-gpu; set that, too")
        limit = train.max_tokens_per_gpu if train.use_dynamic_batch_size else None
        costs = None
        if self.model is not None:
            trained = np.add.reduceat(mask, cu_seqlens[:-1], dtype=np.int64)
            costs = sample_flops(self.model, lengths.tolist(), trained.tolist())
        return plan_steps(
            lengths.tolist(),
            trajectory_ids.tolist(),
            global_batch_size=self.global_batch_size,
            dp_size=self.dp_size,
            max_tokens=None if limit is None else limit * self.sizes.context,
            micro_batch_size=train.micro_batch_size,
            costs=costs,
            multiple=self.sizes.stages.micro_batch_multiple,
            lockstep=self.sizes.in_lockstep,
        )

    def planned_for_critic(self, batch: TrainBatch) -> TrainBatch:
        """The batch as a critic's own ranks get it: the same samples in the same order and steps, cut for them.

        It comes without what only the policy reads.
        """
        steps = self.plan(batch.lengths, batch.loss_mask, batch.cu_seqlens, batch.trajectory_ids)
        return replace(batch, steps=steps, routed_experts=None, support=None)
