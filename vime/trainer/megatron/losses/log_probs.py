"""Log-probs and entropy from hidden states, chunk by chunk, so that the logits of a whole batch never exist.

P positions, V vocabulary, D hidden, C chunk size. Logits live for one chunk in forward and again in backward, where
they are computed a second time. The weight's gradient is added to Megatron's gradient buffer where there is one, in
blocks of the vocabulary, so that no other tensor of the weight's size exists.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from vime.models.memory import HEAD_BLOCK_BYTES
from vime.trainer.megatron.aligned import head_product
from vime.trainer.megatron.batches.support import MicroSupport
from vime.trainer.megatron.nn.compiled import compiled


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """Tensor parallel: each rank has some of the vocabulary, and the sums over it go over the ranks."""

    start: int
    """The first token this rank's rows stand for."""
    group: ProcessGroup


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk_size: int,
    with_entropy_grad: bool = False,
    shard: VocabularyShard | None = None,
    num_rows: int | None = None,
    weight_is_shared: bool = True,
    support: MicroSupport | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, and the entropy of each distribution.

    Args:
        hidden: [P, D] after the final norm.
        weight: [V, D] output layer. If it has a float32 `main_grad`, its gradient is added there, not to `grad`.
        targets: [P] int64.
        temperature: logits are divided by it, as the engine's sampler does.
        chunk_size: C.
        with_entropy_grad: let gradients flow through the entropy too.
        shard: where this rank's `weight` lies in the vocabulary; None: it is whole. The gradient by `hidden` is then
            this rank's share, to be summed over the ranks.
        num_rows: of `weight`, without those of a padded vocabulary; None: all.
        weight_is_shared: autograd gives `weight` a gradient from elsewhere, too (a tied embedding). Otherwise `grad` is
            set to zeros that take no memory, because Megatron's hooks may want one.
        support: of the P positions; log-probs and entropies are of the distribution over it alone, renormalised. The
            targets must lie within. None: the whole vocabulary.
    Returns: log_probs [P] and entropy [P], float32, in nats; entropy is detached without `with_entropy_grad`.
    """
    if shard is not None:
        targets = targets - shard.start
    rows = weight.shape[0] if num_rows is None else num_rows
    log_probs, entropy = _ChunkedLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperature, chunk_size, shard, rows, weight_is_shared, support
    )
    return log_probs, entropy if with_entropy_grad else entropy.detach()


_NO_GRADIENTS = (None,) * 7  # of what follows hidden and weight


@dataclass(frozen=True, slots=True)
class _LogitsOf:
    """Makes the logits of a chunk of positions."""

    hidden: Tensor
    weight: Tensor
    support: MicroSupport | None
    first: int
    """The token that the first row of `weight` stands for."""

    def __call__(self, positions: slice) -> Tensor:
        logits = head_product(self.hidden[positions], self.weight)
        return logits if self.support is None else self.support.narrowed(logits, positions, self.first)


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        shard: VocabularyShard | None,
        num_rows: int,
        weight_is_shared: bool,
        support: MicroSupport | None,
    ) -> tuple[Tensor, Tensor]:
        log_probs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        entropy, log_z = torch.empty_like(log_probs), torch.empty_like(log_probs)
        values = _values if shard is None else functools.partial(_values_of_shards, group=shard.group)
        logits_of = _LogitsOf(hidden, weight[:num_rows], support, 0 if shard is None else shard.start)
        for rows in _chunks(hidden.shape[0], chunk_size):
            logits = logits_of(rows)
            log_probs[rows], entropy[rows], log_z[rows] = values(logits, targets[rows], temperature)
            del logits  # before the next ones are made
        ctx.save_for_backward(hidden, weight, targets, entropy, log_z)
        ctx.temperature, ctx.chunk_size, ctx.num_rows = temperature, chunk_size, num_rows
        ctx.weight_is_shared, ctx.support, ctx.first = weight_is_shared, support, logits_of.first
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, entropy, log_z = ctx.saved_tensors
        d_log_probs, d_entropy = (torch.zeros_like(log_z) if g is None else g.contiguous() for g in grads)
        d_hidden = torch.zeros_like(hidden)
        real = weight.detach()[: ctx.num_rows]
        logits_of = _LogitsOf(hidden, real, ctx.support, ctx.first)
        weight_is_trained = ctx.needs_input_grad[1]
        d_weight, returned = _gradient_of(weight) if weight_is_trained else (None, False)
        d_logits_of = _d_logits if grads[1] is not None else _d_logits_without_entropy
        for rows in _chunks(hidden.shape[0], ctx.chunk_size):
            d_logits = d_logits_of(
                logits_of(rows),
                targets[rows],
                log_z[rows],
                entropy[rows],
                d_log_probs[rows],
                d_entropy[rows],
                ctx.temperature,
            )
            d_hidden[rows] = d_logits @ real
            if d_weight is not None:
                _add_product(d_weight[: ctx.num_rows], d_logits, hidden[rows])
            del d_logits
        if returned and d_weight is not None:
            return d_hidden, d_weight.to(weight.dtype), *_NO_GRADIENTS
        if weight_is_trained and not ctx.weight_is_shared and weight.grad is None:
            weight.grad = weight.new_zeros(()).expand_as(weight)
        return d_hidden, None, *_NO_GRADIENTS


def _gradient_of(weight: Tensor) -> tuple[Tensor, bool]:
    """What the weight's gradient is added to, and whether autograd is to have it.

    In float32, so that the sum over chunks loses no more than one matmul over all positions would.
    """
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is not None and main_grad.dtype == torch.float32:
        return main_grad, False
    return torch.zeros_like(weight, dtype=torch.float32), True


def _add_product(total: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
    """total [V, D] += d_logits [C, V] transposed @ hidden [C, D]."""
    if total.dtype == d_logits.dtype:
        total.addmm_(d_logits.t(), hidden)
    elif d_logits.is_cuda and adds_to_float32(d_logits.dtype):
        torch.ops.aten.addmm.dtype_out(total, d_logits.t(), hidden, total.dtype, out=total)
    else:
        size = max(1, HEAD_BLOCK_BYTES // (hidden.shape[1] * hidden.itemsize))
        for rows in _chunks(total.shape[0], size):
            total[rows] += d_logits[:, rows].t() @ hidden


@functools.cache
def adds_to_float32(dtype: torch.dtype) -> bool:
    """Whether this torch adds a product of such matrices to a float32 one on CUDA; tried once.

    Versions differ in what they take. Without it the product is made block by block in `dtype`, and then added.
    """
    ones = torch.ones(16, 16, device="cuda", dtype=dtype)
    total = torch.ones(16, 16, device="cuda")
    try:
        torch.ops.aten.addmm.dtype_out(total, ones.t(), ones, total.dtype, out=total)
    except (AttributeError, RuntimeError):  # older ones do not have it, or not with such a sum
        return False
    return bool((total == 17).all())


# Logits come in the model's dtype, as in the engine; everything after that is in float32. C rows of V columns.


@compiled(0, 1)
def _values(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Each [C] float32: the target's log-prob, the entropy, and log of the sum of exponentials.

    Logits are read twice: for their largest, then for both sums.
    """
    x = logits.float() / temperature
    largest = x.amax(-1, keepdim=True)
    below = x - largest
    e = below.exp()
    total = e.sum(-1)
    log_total = total.log()
    log_z = largest[:, 0] + log_total
    entropy = log_total - (e * below).sum(-1) / total  # both parts are positive
    if x.is_cuda:
        of_target = x.gather(1, targets[:, None])[:, 0] - largest[:, 0] - log_total
    else:  # the engine's own function: it sums in another order
        of_target = x.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return of_target, entropy, log_z


def _values_of_shards(
    logits: Tensor, targets: Tensor, temperature: float, *, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """`_values` of logits whose columns are spread over ranks; a target elsewhere is outside [0, columns).

    Two collectives of a few numbers per position. A rank may have no column at all.
    """
    if logits.shape[1]:
        mine = _log_z(logits, temperature)
    else:
        mine = torch.full(logits.shape[:1], -torch.inf, device=logits.device)
    parts = mine.new_empty(group.size() * len(mine))
    dist.all_gather_into_tensor(parts, mine, group=group)
    log_z = parts.view(group.size(), -1).logsumexp(0)
    sums = _sums(logits, targets, log_z, temperature)
    dist.all_reduce(sums, group=group)
    return sums[0], sums[1], log_z


@compiled(0)
def _log_z(logits: Tensor, temperature: float) -> Tensor:
    """[C] log of the sum of exponentials of these columns."""
    return (logits.float() / temperature).logsumexp(-1)


@compiled(0, 1, 2)
def _sums(logits: Tensor, targets: Tensor, log_z: Tensor, temperature: float) -> Tensor:
    """[2, C] what these columns give to the target's log-prob and to the entropy."""
    log_p = logits.float() / temperature - log_z[:, None]
    here = targets[:, None] == torch.arange(logits.shape[1], device=logits.device)
    return torch.stack([torch.where(here, log_p, 0.0).sum(-1), -(log_p.exp() * log_p).sum(-1)])


@compiled(0, 1, 2, 3, 4, 5)
def _d_logits(
    logits: Tensor, targets: Tensor, log_z: Tensor, entropy: Tensor, g: Tensor, h: Tensor, temperature: float
) -> Tensor:
    """[C, V] gradient by the logits, from g [C] by the log-probs and h [C] by the entropy.

    d log p_t / d x_j = [j = t] - p_j and d H / d x_j = -p_j (log p_j + H).
    """
    log_p = logits.float() / temperature - log_z[:, None]
    d = -log_p.exp() * (g[:, None] + h[:, None] * (log_p + entropy[:, None]))
    return (_add_at(d, targets, g) / temperature).to(logits.dtype)


@compiled(0, 1, 2, 3, 4, 5)
def _d_logits_without_entropy(
    logits: Tensor, targets: Tensor, log_z: Tensor, entropy: Tensor, g: Tensor, h: Tensor, temperature: float
) -> Tensor:
    """`_d_logits` with h = 0."""
    p = (logits.float() / temperature - log_z[:, None]).exp()
    return (_add_at(-g[:, None] * p, targets, g) / temperature).to(logits.dtype)


def _add_at(d: Tensor, targets: Tensor, g: Tensor) -> Tensor:
    """Add g at the targets; before rounding, because g - p g cancels where p is near 1. A comparison fuses, a scatter
    does not."""
    columns = torch.arange(d.shape[1], device=d.device)
    return torch.where(columns == targets[:, None], d + g[:, None], d)


def _chunks(n: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]
