"""The loss of one micro-batch, as the run is configured, and the sums that are logged of it.

P wanted tokens of a micro-batch. Everything is a plain sum over tokens: the weights hold every divisor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vime.algo.cispo import cispo_loss
from vime.algo.distill import taught_advantages
from vime.algo.kl import kl_estimate
from vime.algo.opsm import on_policy_enough
from vime.algo.policy_loss import PolicyLoss, clipped_loss
from vime.algo.reinforce import reinforce_loss
from vime.algo.sequences import Sequences
from vime.batch_columns import TEACHER_LOG_PROBS
from vime.config import AlgoConfig
from vime.config.estimators import kl_type, pg_loss_type
from vime.protocols import CorrectionInputs, LossInputs
from vime.trainer.megatron import parallel
from vime.trainer.megatron.batches.packing import MicroBatch
from vime.trainer.megatron.losses.correction import OwnWeights, correction, logged_names
from vime.types import (
    CORRECTION_WEIGHTS,
    METRIC_WEIGHTS,
    PG_WEIGHTS,
    TOKEN_ADVANTAGES,
    TrainBatch,
)

OwnLoss: TypeAlias = Callable[[LossInputs], tuple[Tensor, Mapping[str, float]]]


@dataclass(frozen=True, slots=True)
class OwnFunctions:
    """Users' functions, where a run has them."""

    loss: OwnLoss | None = None
    """In the place of the policy loss."""
    weights: OwnWeights | None = None
    """In the place of the weights of --use-tis."""


@dataclass(frozen=True, slots=True)
class Columns:
    """What the loss reads beside the batch. Both [T] float32, NaN where unknown."""

    old_log_probs: npt.NDArray[np.float32] | None
    """Of the policy that sampled. None: it has not moved since, so its own detached log-probs are the old ones."""
    ref_log_probs: npt.NDArray[np.float32] | None
    first_log_probs: npt.NDArray[np.float32] | None = None
    """The trainer's before the first step, which corrections compare with the engine's. None: as above."""

    @classmethod
    def of(
        cls,
        batch: TrainBatch,
        first: npt.NDArray[np.float32] | None,
        reference: npt.NDArray[np.float32] | None,
        algo: AlgoConfig,
    ) -> Columns:
        """Args: first: the trainer's before the first step, where known; with --keep-old-actor the sampler's."""
        # The old policy is the one that sampled. Of an earlier version only what it said is left, unless its weights
        # are kept; with --use-tis the old policy is the trainer's all the same, and the weights hold the whole way
        # from the one that sampled.
        engine = algo.use_rollout_logprobs or (batch.is_older and not (algo.use_tis or algo.keep_old_actor))
        return cls(batch.rollout_log_probs if engine else first, reference, first)


@dataclass(frozen=True, slots=True)
class MicroLoss:
    """Of one micro-batch."""

    loss: Tensor
    """Its summand of the step's loss, differentiable."""
    sums: Tensor
    """[names] its summands of what is logged, detached, in the order of `sum_names`."""
    log_probs: Tensor
    """[P] detached."""
    wanted: npt.NDArray[np.int64]
    own: Mapping[str, float]
    """What a custom loss function reported."""


def sum_names(algo: AlgoConfig, *, with_own_loss: bool) -> tuple[str, ...]:
    """What is summed over a step's tokens under these settings, by its name under train/."""
    names = ["loss", "pg_loss", "ppo_kl", "kl_loss", "entropy_loss"]
    if algo.use_opd and algo.loss_type != "sft_loss":
        names.append("opd_kl")
    if with_own_loss:
        return tuple(names)
    names.append("pg_clipfrac")
    if algo.loss_type == "policy_loss":
        names += ["ratio", "pg_clipfrac_low", "pg_clipfrac_high"]
        names += ["pg_clipfrac_dual"] if algo.eps_clip_c is not None else []
        names += ["opsm_clipfrac"] if algo.use_opsm else []
        names += logged_names(algo)
    return tuple(names)


def micro_loss(
    log_probs: Tensor,
    entropy: Tensor,
    micro: MicroBatch,
    batch: TrainBatch,
    columns: Columns,
    algo: AlgoConfig,
    functions: OwnFunctions,
) -> MicroLoss:
    """The loss of one micro-batch, differentiable, and the sums to log; nothing waits for the device.

    Args: log_probs, entropy: [P] of the model, differentiable.
    """
    read = _Reader(batch, micro, log_probs.device)
    weights = read.tokens(batch.loss_weights)
    of_metrics = read.tokens(batch.extra[METRIC_WEIGHTS]) if METRIC_WEIGHTS in batch.extra else weights
    detached = log_probs.detach()
    old = detached if columns.old_log_probs is None else read.tokens(columns.old_log_probs)
    advantages, logged = _advantages(old, read, algo)
    own: Mapping[str, float] = {}
    if functions.loss is not None:
        main, own = functions.loss(_loss_inputs(log_probs, entropy, old, advantages, columns, read))
        if not len(micro.wanted):
            main = main + log_probs.sum()  # of nothing, but backward must run: other ranks may wait for this one there
    elif algo.loss_type == "sft_loss":
        main = -(weights * log_probs).sum()
    else:
        token_loss, more = _policy_loss(log_probs, old, advantages, read, algo)
        logged |= more
        if algo.corrects:
            token_loss, more, own = _corrected(token_loss, advantages, detached, read, columns, algo, functions.weights)
            logged |= more
        main = (read.tokens(batch.extra.get(PG_WEIGHTS, batch.loss_weights)) * token_loss).sum()
    if functions.loss is not None or algo.loss_type == "policy_loss":
        logged["ppo_kl"] = old - detached
    loss = main
    if columns.ref_log_probs is not None and algo.use_kl_loss:
        reference = read.tokens(columns.ref_log_probs)
        # The token's own ratio also with gspo: the mean over its sequence is no importance weight of this token.
        log_ratio = log_probs - old if algo.use_unbiased_kl else None
        kl = kl_estimate(log_probs, reference, kl_type(algo), log_ratio=log_ratio)
        loss = loss + algo.kl_loss_coef * (weights * kl).sum()
        logged["kl_loss"] = kl
    logged["entropy_loss"] = entropy
    if algo.entropy_coef:
        loss = loss - algo.entropy_coef * (weights * entropy).sum()
    sums = {name: (of_metrics * values.detach()).sum() for name, values in logged.items()}
    sums |= {"loss": loss.detach(), "pg_loss": main.detach()}
    zero = detached.new_zeros(())
    names = sum_names(algo, with_own_loss=functions.loss is not None)
    return MicroLoss(loss, torch.stack([sums.get(name, zero) for name in names]), detached, micro.wanted, own)


def _advantages(old: Tensor, read: _Reader, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """[P] the advantage of each token, and what is logged of each."""
    advantages = read.advantages()
    if not algo.use_opd or algo.loss_type == "sft_loss":
        return advantages, {}
    teacher = read.tokens(read.batch.extra[TEACHER_LOG_PROBS])
    taught = taught_advantages(advantages, old, teacher, coef=algo.opd_kl_coef)
    return taught.advantages, {"opd_kl": taught.kl}


def _policy_loss(
    log_probs: Tensor, old: Tensor, advantages: Tensor, read: _Reader, algo: AlgoConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """[P] the policy loss of each token, differentiable, and what is logged of each."""
    result: PolicyLoss
    match pg_loss_type(algo):
        case "cispo":
            result = cispo_loss(log_probs, old, advantages, eps_clip=algo.eps_clip, eps_clip_high=algo.eps_clip_high)
        case "reinforce":
            result = reinforce_loss(log_probs, old, advantages)
        case kind:
            log_ratio = log_probs - old
            result = clipped_loss(
                read.sequences().mean(log_ratio) if kind == "gspo" else log_ratio,
                advantages,
                eps_clip=algo.eps_clip,
                eps_clip_high=algo.eps_clip_high,
                eps_clip_c=algo.eps_clip_c,
            )
    logged = {
        "ratio": result.ratio,
        "pg_clipfrac": result.clipped,
        "pg_clipfrac_low": result.clipped & (result.ratio < 1),
        "pg_clipfrac_high": result.clipped & (result.ratio > 1),
        "pg_clipfrac_dual": result.dual_clipped,
    }
    if not algo.use_opsm:
        return result.loss, logged
    sampled = read.tokens(read.batch.rollout_log_probs)
    keep, _ = on_policy_enough(log_probs, sampled, advantages, read.sequences(), delta=algo.opsm_delta)
    # Selected, not multiplied: a dropped token's ratio may be infinite, and its gradient would be NaN.
    return torch.where(keep, result.loss, torch.zeros_like(result.loss)), logged | {"opsm_clipfrac": ~keep}


def _corrected(
    token_loss: Tensor,
    advantages: Tensor,
    detached: Tensor,
    read: _Reader,
    columns: Columns,
    algo: AlgoConfig,
    own_weights: OwnWeights | None,
) -> tuple[Tensor, dict[str, Tensor], Mapping[str, float]]:
    """[P] the token losses weighted for the difference of engine and trainer, what is logged, users' own metrics."""
    logged: dict[str, Tensor] = {}
    own: Mapping[str, float] = {}
    if (known := read.batch.extra.get(CORRECTION_WEIGHTS)) is not None:
        weights = read.tokens(known)
    else:
        first = detached if columns.first_log_probs is None else read.tokens(columns.first_log_probs)
        sampled, sequences, theirs = read.tokens(read.batch.rollout_log_probs), read.sequences(), None
        if own_weights is not None:
            theirs, own = own_weights(
                _correction_inputs(token_loss.detach(), advantages, first, sampled, sequences, read)
            )
        result = correction(first - sampled, sequences, algo, theirs)
        weights, logged = result.weights, result.logged
    # Selected, not only multiplied: a rejected token's ratio may be so large that its gradient is not finite.
    return torch.where(weights != 0, weights * token_loss, torch.zeros_like(token_loss)), logged, own


@dataclass(frozen=True, slots=True)
class _Reader:
    """A batch's columns as a micro-batch's tokens see them, on the device."""

    batch: TrainBatch
    micro: MicroBatch
    device: torch.device

    def tokens(self, column: npt.NDArray[Any]) -> Tensor:
        """[P] of a [T] column."""
        return torch.from_numpy(column[self.micro.wanted]).to(self.device, non_blocking=True)

    def samples(self, column: npt.NDArray[Any]) -> Tensor:
        """[P] of a [B] column."""
        return torch.from_numpy(column[self.micro.samples]).to(self.device, non_blocking=True)

    def advantages(self) -> Tensor:
        """[P]"""
        per_token = self.batch.extra.get(TOKEN_ADVANTAGES)
        return self.samples(self.batch.advantages) if per_token is None else self.tokens(per_token)

    def sequences(self) -> Sequences:
        """Which sequence each token belongs to. Collective in use: context-parallel ranks have parts of them."""
        members, cu = self.micro.members, self.batch.cu_seqlens
        counts = np.array([np.count_nonzero(self.batch.loss_mask[cu[i] : cu[i + 1]]) for i in members], np.float32)
        return Sequences(
            index=torch.from_numpy(np.searchsorted(members, self.micro.samples)).to(self.device, non_blocking=True),
            counts=torch.from_numpy(counts).to(self.device, non_blocking=True),
            sum_over_ranks=_SumOverContextRanks.apply if parallel.cp_size() > 1 else None,
        )


class _SumOverContextRanks(torch.autograd.Function):
    """The sum over context-parallel ranks. Every rank's loss depends on it, so that gradients are summed, too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return _all_reduced(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _all_reduced(grad)


def _all_reduced(values: Tensor) -> Tensor:
    total = values.clone()
    torch.distributed.all_reduce(total, group=parallel.cp_group())
    return total


def _correction_inputs(
    pg_loss: Tensor, advantages: Tensor, first: Tensor, sampled: Tensor, sequences: Sequences, read: _Reader
) -> CorrectionInputs:
    """What a custom function of importance weights sees of a micro-batch."""
    return CorrectionInputs(
        old_log_probs=first,
        rollout_log_probs=sampled,
        pg_loss=pg_loss,
        advantages=advantages,
        weights=read.tokens(read.batch.extra.get(METRIC_WEIGHTS, read.batch.loss_weights)),
        samples=torch.from_numpy(read.micro.samples).to(pg_loss.device),
        sequence_mean=sequences.mean,
        sequence_sum=sequences.total,
    )


def _loss_inputs(
    log_probs: Tensor, entropy: Tensor, old: Tensor, advantages: Tensor, columns: Columns, read: _Reader
) -> LossInputs:
    """What a custom loss function sees of a micro-batch."""
    batch, micro, ref = read.batch, read.micro, columns.ref_log_probs
    num_tokens = len(batch.tokens)
    return LossInputs(
        log_probs=log_probs,
        entropy=entropy,
        old_log_probs=old,
        rollout_log_probs=read.tokens(batch.rollout_log_probs),
        ref_log_probs=None if ref is None else read.tokens(ref),
        advantages=advantages,
        weights=read.tokens(batch.loss_weights),
        tokens=read.tokens(batch.tokens).long(),
        samples=torch.from_numpy(micro.samples).to(log_probs.device),
        extra={
            name: read.tokens(values) if len(values) == num_tokens else read.samples(values)
            for name, values in batch.extra.items()
        },
    )
