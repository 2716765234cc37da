"""The forward pass alone: log-probs of micro-batches, through all pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from vime.trainer.megatron.packing import MicroBatch

# Megatron's schedules want a loss, and a token count to divide gradients by; ours are not divided.
ZERO_TOKENS = torch.tensor(0, dtype=torch.int)


@torch.no_grad()
def forward_log_probs(
    model: torch.nn.Module, micro_batches: Iterator[MicroBatch], num_micro_batches: int
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
        run_schedule(forward, micro_batches, model, num_micro_batches, forward_only=True)
    if not results:
        return np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int64)
    return torch.cat(results).cpu().numpy(), np.concatenate(places)


def run_schedule(
    forward: Callable[..., Any],
    micro_batches: Iterator[MicroBatch],
    model: torch.nn.Module,
    num_micro_batches: int,
    *,
    forward_only: bool,
) -> None:
    """Megatron's schedule for this layout: micro-batches one by one, or one forward, one backward over stages."""
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=micro_batches,
        model=[model],
        num_microbatches=num_micro_batches,
        seq_length=1,  # stages tell each other the real one
        micro_batch_size=1,
        forward_only=forward_only,
    )
