"""One optimizer step of the policy: the loss of its micro-batches, and what is logged of them.

P wanted tokens of a micro-batch. The loss of a step is the plain sum over all its tokens of loss_weights * token loss:
the weights hold every divisor, so neither micro-batches nor ranks nor packing can change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vime.algo.kl import kl_estimate
from vime.algo.policy_loss import ppo_clip_loss
from vime.config import AlgoConfig
from vime.protocols import LossInputs
from vime.trainer.megatron import parallel
from vime.trainer.megatron.model import Policy
from vime.trainer.megatron.optimizer_step import optimizer_step
from vime.trainer.megatron.packing import MicroBatch
from vime.trainer.megatron.user_hooks import sum_own_metrics
from vime.types import PG_WEIGHTS, TOKEN_ADVANTAGES, Metrics, TrainBatch

OwnLoss: TypeAlias = Callable[[LossInputs], tuple[Tensor, Mapping[str, float]]]
SUMS = ("loss", "pg_loss", "pg_clipfrac", "ppo_kl", "kl_loss", "entropy_loss")
"""What is summed over a step's tokens, each weighted with loss_weights like the loss itself."""


@dataclass(frozen=True, slots=True)
class Columns:
    """What the loss reads beside the batch. Both [T] float32, NaN where unknown."""

    old_log_probs: npt.NDArray[np.float32] | None
    """None: the policy has not moved yet, so its own detached log-probs are the old ones."""
    ref_log_probs: npt.NDArray[np.float32] | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step, as seen by all ranks."""

    sums: Mapping[str, float]
    """By the names in SUMS."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    """Of this update."""
    log_probs: Tensor
    """[wanted tokens whose log-probs this rank computed] float32, from before the update, on the device."""
    wanted: npt.NDArray[np.int64]
    """Their positions in the batch."""
    own: Mapping[str, float]
    """Sums that a custom loss function reported, by its names."""


def train_step(
    policy: Policy,
    micro_batches: Iterator[MicroBatch],
    num_micro_batches: int,
    batch: TrainBatch,
    columns: Columns,
    algo: AlgoConfig,
    *,
    where: str,
    own_loss: OwnLoss | None = None,
) -> StepResult:
    """Forward, backward, clip, update.

    Args:
        micro_batches: this rank's, made as they are asked for.
        where: rollout and step, for errors.
        own_loss: in the place of the policy loss.
    Raises: TrainingError if a loss or a gradient is not finite; the weights are then unchanged.
    """
    results: list[_MicroResult] = []

    def loss_of(out: tuple[Tensor, Tensor], micro: MicroBatch) -> tuple[Tensor, Tensor]:
        result = _micro_loss(out[0], out[1], micro, batch, columns, algo, own_loss)
        results.append(result)
        return result.loss, result.sums

    update = optimizer_step(
        policy, micro_batches, num_micro_batches, loss_of, names=SUMS, where=where, suspects="log-probs and advantages"
    )
    own = {} if own_loss is None else sum_own_metrics(_added([r.own for r in results]), parallel.counts())
    return StepResult(
        sums=update.sums,
        grad_norm=update.grad_norm,
        learning_rate=update.learning_rate,
        own=own,
        log_probs=torch.cat([r.log_probs for r in results]) if results else torch.empty(0),
        wanted=np.concatenate([r.wanted for r in results]) if results else np.empty(0, dtype=np.int64),
    )


def result_metrics(results: Sequence[StepResult], *, with_own_loss: bool) -> Metrics:
    """train/* of a rollout's optimizer steps: means over them; custom/* of a custom loss, which clips nothing."""
    names = [name for name in SUMS if not (with_own_loss and name == "pg_clipfrac")]
    metrics = {f"train/{name}": sum(r.sums[name] for r in results) / len(results) for name in names}
    metrics |= {f"custom/{name}": sum(r.own[name] for r in results) / len(results) for name in results[0].own}
    metrics["train/grad_norm"] = sum(r.grad_norm for r in results) / len(results)
    metrics["train/lr-pg_0"] = results[-1].learning_rate
    return metrics


@dataclass(frozen=True, slots=True)
class _MicroResult:
    loss: Tensor
    sums: Tensor
    log_probs: Tensor
    wanted: npt.NDArray[np.int64]
    own: Mapping[str, float]


def _micro_loss(
    log_probs: Tensor,
    entropy: Tensor,
    micro: MicroBatch,
    batch: TrainBatch,
    columns: Columns,
    algo: AlgoConfig,
    own_loss: OwnLoss | None,
) -> _MicroResult:
    """The loss of one micro-batch, differentiable, and the sums to log; nothing waits for the device."""
    detached = log_probs.detach()

    def column(values: npt.NDArray[Any], index: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values[index]).to(log_probs.device, non_blocking=True)

    weights = column(batch.loss_weights, micro.wanted)
    zero = detached.new_zeros(())
    clip_fraction = log_ratio = kl = zero
    own: Mapping[str, float] = {}
    if own_loss is not None:
        inputs = _loss_inputs(log_probs, entropy, micro, batch, columns, column)
        main, own = own_loss(inputs)
        if not len(micro.wanted):
            main = main + log_probs.sum()  # of nothing, but backward must run: other ranks may wait for this one there
        log_ratio = (weights * (inputs.old_log_probs - detached)).sum()
    elif algo.loss_type == "sft_loss":
        main = -(weights * log_probs).sum()
    else:
        old = detached if columns.old_log_probs is None else column(columns.old_log_probs, micro.wanted)
        advantages = batch.extra.get(TOKEN_ADVANTAGES)
        policy_loss = ppo_clip_loss(
            log_probs,
            old,
            column(batch.advantages, micro.samples) if advantages is None else column(advantages, micro.wanted),
            eps_clip=algo.eps_clip,
            eps_clip_high=algo.eps_clip_high,
            eps_clip_c=algo.eps_clip_c,
        )
        main = (column(batch.extra.get(PG_WEIGHTS, batch.loss_weights), micro.wanted) * policy_loss.loss).sum()
        clip_fraction = (weights * policy_loss.clipped).sum()
        log_ratio = (weights * (old - detached)).sum()
    loss = main
    if columns.ref_log_probs is not None:
        reference = column(columns.ref_log_probs, micro.wanted)
        kl = (weights * kl_estimate(log_probs, reference, algo.kl_loss_type)).sum()
        loss = loss + algo.kl_loss_coef * kl
    entropy_sum = (weights * entropy).sum()
    if algo.entropy_coef:
        loss = loss - algo.entropy_coef * entropy_sum
    sums = torch.stack([x.detach() for x in (loss, main, clip_fraction, log_ratio, kl, entropy_sum)])
    return _MicroResult(loss, sums, detached, micro.wanted, own)


def _loss_inputs(
    log_probs: Tensor,
    entropy: Tensor,
    micro: MicroBatch,
    batch: TrainBatch,
    columns: Columns,
    column: Callable[[npt.NDArray[Any], npt.NDArray[np.int64]], Tensor],
) -> LossInputs:
    """What a custom loss function sees of a micro-batch."""
    advantages = batch.extra.get(TOKEN_ADVANTAGES)
    old, ref = columns.old_log_probs, columns.ref_log_probs
    num_tokens = len(batch.tokens)
    return LossInputs(
        log_probs=log_probs,
        entropy=entropy,
        old_log_probs=log_probs.detach() if old is None else column(old, micro.wanted),
        rollout_log_probs=column(batch.rollout_log_probs, micro.wanted),
        ref_log_probs=None if ref is None else column(ref, micro.wanted),
        advantages=column(batch.advantages, micro.samples) if advantages is None else column(advantages, micro.wanted),
        weights=column(batch.loss_weights, micro.wanted),
        tokens=column(batch.tokens, micro.wanted).long(),
        samples=torch.from_numpy(micro.samples).to(log_probs.device),
        extra={
            name: column(values, micro.wanted if len(values) == num_tokens else micro.samples)
            for name, values in batch.extra.items()
        },
    )


def _added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sum of each name over micro-batches."""
    return {name: sum(part.get(name, 0.0) for part in parts) for name in dict.fromkeys(n for p in parts for n in p)}
