"""Process groups: torch.distributed, then Megatron's division of the ranks, and what each rank is in it.

Neighbouring ranks are tensor-parallel, then come context, data and pipeline: rank 0 is the first of every dimension.
For experts, the ranks of a stage are divided anew: expert-tensor-parallel, then expert-parallel, then copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import ProcessGroup

from vime.config.parallel import ParallelSizes


def start(
    *,
    backend: str,
    init_method: Any,
    rank: int,
    world_size: int,
    timeout_minutes: int,
    seed: int,
    sizes: ParallelSizes = ParallelSizes(),  # noqa: B008 - frozen
    virtual_stages: int | None = None,
) -> None:
    """Join the other ranks.

    Args:
        init_method: where the ranks find each other: as torch.distributed takes it, or a store.
        seed: of Megatron's random streams and of the model's fresh weights; equal on all ranks. Pipeline stages and
            tensor-parallel ranks draw differently, data- and context-parallel ranks alike; experts have a stream of
            their own, different on ranks that hold different parts of them.
        sizes: of the parallel dimensions.
        virtual_stages: pipeline stages that each rank has, if more than one.
    """
    if dist.is_initialized():
        raise RuntimeError("this process already belongs to a trainer; close it first")
    timeout = timedelta(minutes=timeout_minutes)
    where: dict[str, Any] = {"init_method" if isinstance(init_method, str) else "store": init_method}
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout, **where)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=virtual_stages,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
        order="tp-cp-ep-dp-pp",
        distributed_timeout_minutes=timeout_minutes,
        create_gloo_process_groups=False,
    )
    stage_seed = seed + 100 * pp_rank()  # as Megatron-LM spaces them
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed, force_reset_rng=True)


def stop() -> None:
    """Leave; another `start` may follow in this process."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def world_size() -> int:
    """Number of all ranks."""
    return dist.get_world_size()


def dp_rank() -> int:
    """This rank's number among the data-parallel ranks."""
    return int(parallel_state.get_data_parallel_rank())


def dp_size() -> int:
    """Number of data-parallel ranks."""
    return int(parallel_state.get_data_parallel_world_size())


def tp_rank() -> int:
    """This rank's number among the tensor-parallel ranks."""
    return int(parallel_state.get_tensor_model_parallel_rank())


def tp_size() -> int:
    """Number of tensor-parallel ranks."""
    return int(parallel_state.get_tensor_model_parallel_world_size())


def tp_group() -> ProcessGroup:
    """The ranks that hold the other parts of this rank's tensors."""
    group: ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    return group


def cp_rank() -> int:
    """This rank's number among the context-parallel ranks."""
    return int(parallel_state.get_context_parallel_rank())


def cp_size() -> int:
    """Number of context-parallel ranks."""
    return int(parallel_state.get_context_parallel_world_size())


def cp_group() -> ProcessGroup:
    """The ranks that hold the other parts of this rank's sequences."""
    group: ProcessGroup = parallel_state.get_context_parallel_group()
    return group


def pp_rank() -> int:
    """This rank's pipeline stage."""
    return int(parallel_state.get_pipeline_model_parallel_rank())


def pp_size() -> int:
    """Number of pipeline stages."""
    return int(parallel_state.get_pipeline_model_parallel_world_size())


def pp_group() -> ProcessGroup:
    """The ranks that hold the other stages of this rank's layers."""
    group: ProcessGroup = parallel_state.get_pipeline_model_parallel_group()
    return group


def expert_place() -> tuple[int, int, int]:
    """Which experts this rank has: its pipeline stage, expert-parallel and expert-tensor-parallel number."""
    ep, tp = parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_tensor_parallel_rank()
    return pp_rank(), int(ep), int(tp)


def ep_size() -> int:
    """Number of expert-parallel ranks."""
    return int(parallel_state.get_expert_model_parallel_world_size())


def etp_size() -> int:
    """Number of expert-tensor-parallel ranks."""
    return int(parallel_state.get_expert_tensor_parallel_world_size())


def num_virtual_stages() -> int:
    """Pipeline stages that each rank has, each a model chunk of its own."""
    return int(parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1)


def is_first_stage(chunk: int = 0) -> bool:
    """Whether this rank's model chunk of that number holds the embedding."""
    return pp_rank() == 0 and chunk == 0


def is_last_stage(chunk: int = -1) -> bool:
    """Whether this rank's model chunk, by default its last, holds the head: it computes log-probs and losses."""
    return pp_rank() == pp_size() - 1 and chunk in (-1, num_virtual_stages() - 1)


def counts() -> bool:
    """Whether this rank's log-probs and losses count; its tensor-parallel neighbours compute the same once more."""
    return is_last_stage() and tp_rank() == 0


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def barrier() -> None:
    """Wait for all ranks."""
    dist.barrier()


def describe(ranks: Sequence[int]) -> str:
    """Ranks in words, with their place in each dimension that has more than one rank, for errors."""
    return ", ".join(_describe(rank) for rank in ranks)


def _describe(rank: int) -> str:
    place, rest = [], rank
    for name, size in (("tensor", tp_size()), ("context", cp_size()), ("data", dp_size()), ("pipeline", pp_size())):
        rest, at = divmod(rest, size)
        if size > 1:
            place.append(f"{name} {at}")
    if ep_size() > 1:
        per_stage = world_size() // pp_size()
        place.append(f"expert {rank % per_stage // etp_size() % ep_size()}")
    return f"rank {rank} ({', '.join(place)})" if place else f"rank {rank}"
