"""One optimizer step of a model: the sum over its micro-batches, its gradients summed over ranks, clipping, the update.

What is lost on a micro-batch is the caller's: the policy's loss is in train_step.py, the critic's in critic.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from vime.errors import TrainingError
from vime.trainer.megatron import parallel
from vime.trainer.megatron.batches.packing import MicroBatch
from vime.trainer.megatron.forward import ZERO_TOKENS, run_schedule
from vime.trainer.megatron.nn.model import Policy, single_optimizers

LossOf: TypeAlias = Callable[[Any, MicroBatch], tuple[Tensor, Tensor]]
"""(the model's output, the micro-batch) -> its summand of the loss, differentiable, and of what is logged, detached."""


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step, as seen by all ranks."""

    sums: Mapping[str, float]
    """By the caller's names."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    """Of this update."""


@dataclass(frozen=True, slots=True)
class _Blame:
    """What errors tell users to look at."""

    suspects: str
    lr_flag: str

    @property
    def advice(self) -> str:
        return f"Lower {self.lr_flag} or --clip-grad, or look at that rollout's {self.suspects}"


def optimizer_step(
    policy: Policy,
    micro_batches: Iterator[MicroBatch],
    num_micro_batches: int,
    loss_of: LossOf,
    *,
    names: Sequence[str],
    where: str,
    suspects: str,
    lr_flag: str = "--lr",
) -> Update:
    """Forward, backward, clip, update.

    Args:
        micro_batches: this rank's, made as they are asked for.
        loss_of: called once for each of them where this rank has the head; nothing in it should wait for the device.
        names: of the numbers that `loss_of` wants summed up.
        where: rollout and step, for errors.
        suspects: what of a rollout to look at when a number is not finite.
        lr_flag: the setting that is this model's learning rate.
    Raises: TrainingError if a sum or a gradient is not finite; the weights are then unchanged.
    """
    for ddp in policy.ddps:
        ddp.zero_grad_buffer()
    policy.optimizer.zero_grad()
    device = torch.device(torch.cuda.current_device())
    sums = torch.zeros(len(names), device=device)

    def forward(data: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Any, Callable[..., Any]]:
        micro = next(data)
        output = model(micro.input_ids, micro.position_ids, None, packed_seq_params=micro.packed)

        def loss(out: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            value, logged = loss_of(out, micro)
            sums.add_(logged)
            return value, ZERO_TOKENS, {}

        return output, loss

    blame = _Blame(suspects, lr_flag)
    run_schedule(forward, micro_batches, policy.ddps, num_micro_batches, forward_only=False)
    totals = _reduce(policy, sums)
    finalize_model_grads(list(policy.ddps))  # sums over data- and context-parallel ranks; no divisor, see Settings
    if policy.optimizer.prepare_grads():
        raise TrainingError(f"the gradient overflowed, {where}; no update was made")
    grad_norm = float(policy.optimizer.get_grad_norm())  # the one place of a step that waits for the device
    values = _checked(totals.tolist(), names, where, blame)
    _update(policy, grad_norm, where, blame)
    learning_rate = float(policy.optimizer.param_groups[0]["lr"])
    policy.scheduler.step(increment=1)
    return Update(values, grad_norm, learning_rate)


def _reduce(policy: Policy, sums: Tensor) -> Tensor:
    """[names + 2 * ranks] the sums over all ranks, then which ranks' sums, and which ranks' gradients, are not finite.

    Looked at before gradients are summed over ranks, when the rank of a bad one can still be named. One collective
    tells all ranks, so that all stop. A rank alone has its gradients looked at when their norm is not finite.
    """
    ranks = parallel.world_size()
    bad = torch.zeros(2, ranks, dtype=sums.dtype, device=sums.device)
    bad[0, dist.get_rank()] = (~torch.isfinite(sums).all()).to(sums.dtype)
    if ranks > 1 and not policy.ddps[0].ddp_config.overlap_grad_reduce:  # which has summed them already
        bad[1, dist.get_rank()] = _has_bad_grads(policy)
    mine = torch.nan_to_num(sums, nan=0.0, posinf=0.0, neginf=0.0) if parallel.counts() else torch.zeros_like(sums)
    return parallel.sum_over_ranks(torch.cat([mine, bad.flatten()]))


def _checked(total: Sequence[float], names: Sequence[str], where: str, blame: _Blame) -> dict[str, float]:
    """The sums of `_reduce` by name. Raises: TrainingError on every rank, naming those with a bad loss or gradient."""
    flags, ranks = total[len(names) :], parallel.world_size()
    if found := _marked(flags[:ranks]):
        raise TrainingError(
            f"the loss is not finite on {parallel.describe(found)}, {where}; no update was made. Look at that "
            f"rollout's {blame.suspects}, or lower {blame.lr_flag}"
        )
    if found := _marked(flags[ranks:]):
        raise _bad_gradient(found, where, blame)
    return dict(zip(names, total[: len(names)], strict=True))


def _bad_gradient(ranks: Sequence[int], where: str, blame: _Blame) -> TrainingError:
    return TrainingError(
        f"the gradient is not finite on {parallel.describe(ranks)}, {where}; no update was made. {blame.advice}"
    )


def _has_bad_grads(policy: Policy) -> Tensor:
    """1 if a gradient of this rank is not finite, else 0. A sum shows it and needs no memory of the gradients' size."""
    total = torch.stack([grads.sum(dtype=torch.float32) for grads in policy.grad_buffers()]).sum()
    return (~torch.isfinite(total)).to(torch.float32)


def _update(policy: Policy, norm: float, where: str, blame: _Blame) -> None:
    """Check, clip, step. Args: norm: of the gradients of all ranks.

    Taken apart from MegatronOptimizer.step, which would apply a NaN gradient before anyone could look at its norm.
    """
    optimizer = policy.optimizer
    if not math.isfinite(norm):  # on all ranks
        if parallel.world_size() == 1 and _has_bad_grads(policy):
            raise _bad_gradient([0], where, blame)
        raise TrainingError(f"the gradient norm is {norm}, {where}; no update was made. {blame.advice}")
    if (limit := optimizer.config.clip_grad) > 0.0:
        for part in single_optimizers(optimizer):  # experts have one of their own
            if parameters := part.get_parameters():
                decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, limit, norm, decoupled)
    if not optimizer.step_with_ready_grads():
        raise TrainingError(f"the optimizer refused to step, {where}")


def _marked(flags: Sequence[float]) -> list[int]:
    return [rank for rank, flag in enumerate(flags) if flag]
