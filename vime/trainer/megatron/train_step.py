"""One optimizer step of the policy: the loss of its micro-batches, and what is logged of them.

P wanted tokens of a micro-batch. The loss of a step is the plain sum over all its tokens of loss_weights * token loss:
the weights hold every divisor, so neither micro-batches nor ranks nor packing can change it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vime.config import AlgoConfig
from vime.trainer.megatron import parallel
from vime.trainer.megatron.batches.packing import MicroBatch
from vime.trainer.megatron.losses.micro_loss import Columns, MicroLoss, OwnFunctions, micro_loss, sum_names
from vime.trainer.megatron.nn.model import Policy
from vime.trainer.megatron.optimizers.optimizer_step import optimizer_step
from vime.trainer.megatron.user_hooks import sum_own_metrics
from vime.types import Metrics, TrainBatch


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step, as seen by all ranks."""

    sums: Mapping[str, float]
    """By the names of `micro_loss.sum_names`."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    """Of this update."""
    log_probs: Tensor
    """[wanted tokens whose log-probs this rank computed] float32, from before the update, on the device."""
    wanted: npt.NDArray[np.int64]
    """Their positions in the batch."""
    own: Mapping[str, float]
    """Sums that users' functions reported, by their names."""


def train_step(
    policy: Policy,
    micro_batches: Iterator[MicroBatch],
    num_micro_batches: int,
    batch: TrainBatch,
    columns: Columns,
    algo: AlgoConfig,
    *,
    where: str,
    functions: OwnFunctions,
) -> StepResult:
    """Forward, backward, clip, update.

    Args:
        micro_batches: this rank's, made as they are asked for.
        where: rollout and step, for errors.
        functions: users' own.
    Raises: TrainingError if a loss or a gradient is not finite; the weights are then unchanged.
    """
    results: list[MicroLoss] = []

    def loss_of(out: tuple[Tensor, Tensor], micro: MicroBatch) -> tuple[Tensor, Tensor]:
        result = micro_loss(out[0], out[1], micro, batch, columns, algo, functions)
        results.append(result)
        return result.loss, result.sums

    update = optimizer_step(
        policy,
        micro_batches,
        num_micro_batches,
        loss_of,
        names=sum_names(algo, with_own_loss=functions.loss is not None),
        where=where,
        suspects="log-probs and advantages",
    )
    own = {} if functions == OwnFunctions() else sum_own_metrics(_added([r.own for r in results]), parallel.counts())
    return StepResult(
        sums=update.sums,
        grad_norm=update.grad_norm,
        learning_rate=update.learning_rate,
        own=own,
        log_probs=torch.cat([r.log_probs for r in results]) if results else torch.empty(0),
        wanted=np.concatenate([r.wanted for r in results]) if results else np.empty(0, dtype=np.int64),
    )


def result_metrics(results: Sequence[StepResult]) -> Metrics:
    """train/* of a rollout's optimizer steps: means over them; custom/* of a custom loss."""
    metrics = {f"train/{name}": sum(r.sums[name] for r in results) / len(results) for name in results[0].sums}
    metrics |= {f"custom/{name}": sum(r.own[name] for r in results) / len(results) for name in results[0].own}
    metrics["train/grad_norm"] = sum(r.grad_norm for r in results) / len(results)
    metrics["train/lr-pg_0"] = results[-1].learning_rate
    return metrics


def _added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sum of each name over micro-batches."""
    return {name: sum(part.get(name, 0.0) for part in parts) for name in dict.fromkeys(n for p in parts for n in p)}
