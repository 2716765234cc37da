"""The forward pass alone: log-probs of micro-batches, through all pipeline stages, and to all ranks.

T tokens of a batch, P wanted tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import tee
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from vime.config.parallel import ParallelSizes
from vime.data.packing import plan_steps
from vime.errors import TrainingError
from vime.models import ModelSettings
from vime.models.flops import sample_flops
from vime.support import SamplingSupport
from vime.trainer.megatron import parallel
from vime.trainer.megatron.batches.packing import Layout, MicroBatch, pack
from vime.trainer.megatron.batches.routing_replay import RoutingPass
from vime.types import StepPlan, TrainBatch

# Megatron's schedules want a loss, and a token count to divide gradients by; ours are not divided.
ZERO_TOKENS = torch.tensor(0, dtype=torch.int)


NOT_A_NUMBER = np.float32("nan")


def shared_log_probs(
    chunks: Sequence[torch.nn.Module],
    tokens: npt.NDArray[np.int32],
    cu_seqlens: npt.NDArray[np.int64],
    micro_batches: Sequence[Sequence[int]],
    wanted: npt.NDArray[np.bool_],
    *,
    layout: Layout,
    temperature: float,
    support: SamplingSupport | None = None,
    counts: bool = True,
    routing: RoutingPass | None = None,
) -> npt.NDArray[np.float32]:
    """[T] log-probs on every rank, of what each computed of its own micro-batches; NaN where not wanted. Collective.

    Args:
        chunks: of the model, one for each pipeline stage of this rank.
        tokens, cu_seqlens: of the whole batch, equal on all ranks.
        micro_batches: this data-parallel rank's; sample numbers.
        wanted: [T] True where a log-prob is wanted.
        layout, temperature, support, routing: as `pack` takes them.
        counts: False on all but one data-parallel rank where all have the same micro-batches.
    """
    micro_batches = filled_up(micro_batches, layout.group)
    packed = (
        pack(
            tokens,
            cu_seqlens,
            samples,
            wanted,
            layout=layout,
            temperature=temperature,
            support=support,
            routing=routing,
        )
        for samples in micro_batches
    )
    log_probs, places = forward_log_probs(chunks, packed, len(micro_batches))
    return share(log_probs, places, wanted, counts=counts)


def score(
    chunks: Sequence[torch.nn.Module], sequences: Sequence[Sequence[int]], *, layout: Layout
) -> list[npt.NDArray[np.float32]]:
    """Log-probs of whole sequences at temperature 1, on every rank: one [length] array each, NaN first. Collective.

    Raises: ValueError for an empty sequence, or none.
    """
    lengths = np.array([len(s) for s in sequences], dtype=np.int64)
    if not len(lengths) or lengths.min() < 1:
        raise ValueError("score needs sequences of at least one token")
    tokens = np.concatenate([np.asarray(s, dtype=np.int32) for s in sequences])
    cu = np.concatenate([[0], np.cumsum(lengths)])
    wanted = np.ones(len(tokens), dtype=np.bool_)
    wanted[cu[:-1]] = False
    alone = [(i,) for i in range(len(sequences))]
    # Every data-parallel rank computes them all.
    counts = parallel.dp_rank() == 0
    out = shared_log_probs(chunks, tokens, cu, alone, wanted, layout=layout, temperature=1.0, counts=counts)
    return [out[cu[i] : cu[i + 1]] for i in range(len(sequences))]


def check_tokens(batch: TrainBatch, model: ModelSettings) -> None:
    """Raises: TrainingError if the batch has a token id that the model does not."""
    low, high = batch.tokens.min(), batch.tokens.max()
    if not 0 <= low <= high < model.vocab_size:
        raise TrainingError(
            f"rollout {batch.rollout_id} holds token ids from {low} to {high}, the model's vocabulary has "
            f"{model.vocab_size}; look at what the generate function appends"
        )


def share(
    values: npt.NDArray[np.float32],
    places: npt.NDArray[np.int64],
    wanted: npt.NDArray[np.bool_],
    *,
    counts: bool = True,
) -> npt.NDArray[np.float32]:
    """[T] each rank's values at their places, on every rank; NaN where not wanted. Collective."""
    out = np.zeros(len(wanted), dtype=np.float32)
    if counts and parallel.counts():
        out[places] = values
    if parallel.world_size() > 1:
        device = torch.device(torch.cuda.current_device())
        out = parallel.sum_over_ranks(torch.from_numpy(out).to(device)).cpu().numpy()
    return np.where(wanted, out, NOT_A_NUMBER)


def micro_batches_without_gradients(
    batch: TrainBatch, model: ModelSettings, sizes: ParallelSizes, *, limit: int | None
) -> Sequence[Sequence[int]]:
    """This data-parallel rank's samples of the whole batch, for a forward pass alone.

    Args: limit: tokens in one forward pass of one rank; None: micro-batches as they are trained on.
    """
    rank = parallel.dp_rank()
    if limit is None:
        return [micro for step in batch.steps for micro in step[rank]]
    return repack(batch, model, sizes, dp_size=parallel.dp_size(), max_tokens=limit * parallel.cp_size())[rank]


def repack(batch: TrainBatch, model: ModelSettings, sizes: ParallelSizes, *, dp_size: int, max_tokens: int) -> StepPlan:
    """All samples of a batch in micro-batches of another size: without gradients, more tokens fit.

    Returns: [dp_rank][micro_batch] -> samples, as many micro-batches on each rank, as many as virtual stages need.
    """
    lengths = batch.lengths.tolist()
    costs = sample_flops(model, lengths, [length - 1 for length in lengths])
    everything = range(len(lengths))
    (plan,) = plan_steps(
        lengths,
        everything,
        global_batch_size=len(lengths),
        dp_size=dp_size,
        max_tokens=max_tokens,
        costs=costs,
        multiple=sizes.stages.micro_batch_multiple,
        lockstep=sizes.in_lockstep,
    )
    return plan


def filled_up(micro_batches: Sequence[Sequence[int]], multiple: int) -> list[Sequence[int]]:
    """Micro-batches of a number that virtual stages can take, the last of them empty where need be."""
    return [*micro_batches, *[()] * (-len(micro_batches) % multiple)]


@torch.no_grad()
def forward_log_probs(
    chunks: Sequence[torch.nn.Module], micro_batches: Iterator[MicroBatch], num_micro_batches: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Log-probs of the wanted tokens, and their places. Collective over the ranks that share these micro-batches.

    Args: micro_batches: this rank's, made as they are asked for.
    Returns: log_probs [P of all micro-batches] float32 and their positions in the batch; empty on every stage but the
        last.
    """
    results: list[Tensor] = []
    places: list[npt.NDArray[np.int64]] = []

    def forward(data: Iterator[MicroBatch], module: torch.nn.Module) -> tuple[Any, Callable[..., Any]]:
        micro = next(data)
        output = module(micro.input_ids, micro.position_ids, None, packed_seq_params=micro.packed)

        def keep(out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            results.append(out[0])
            places.append(micro.wanted)
            return out[0].sum(), ZERO_TOKENS, {}

        return output, keep

    if num_micro_batches:
        run_schedule(forward, micro_batches, chunks, num_micro_batches, forward_only=True)
    if not results:
        return np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int64)
    return torch.cat(results).cpu().numpy(), np.concatenate(places)


def run_schedule(
    forward: Callable[..., Any],
    micro_batches: Iterator[MicroBatch],
    chunks: Sequence[torch.nn.Module],
    num_micro_batches: int,
    *,
    forward_only: bool,
) -> None:
    """Megatron's schedule for this layout: micro-batches one by one, or one forward, one backward over stages.

    Each chunk works through all micro-batches, made when the first of them asks.
    """
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=list(tee(micro_batches, len(chunks))) if len(chunks) > 1 else micro_batches,
        model=list(chunks),
        num_microbatches=num_micro_batches,
        seq_length=1,  # stages tell each other the real one
        micro_batch_size=1,
        forward_only=forward_only,
    )
