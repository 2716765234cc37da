"""Process groups: torch.distributed, then Megatron's division of the ranks."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel


def start(*, backend: str, init_method: str, rank: int, world_size: int, timeout_minutes: int, seed: int) -> None:
    """Join the other ranks; all of them are data-parallel.

    Args: seed: of Megatron's random streams and of the model's fresh weights; equal on all ranks.
    """
    if dist.is_initialized():
        raise RuntimeError("this process already belongs to a trainer; close it first")
    timeout = timedelta(minutes=timeout_minutes)
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)
    parallel_state.initialize_model_parallel(
        distributed_timeout_minutes=timeout_minutes, create_gloo_process_groups=False
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def stop() -> None:
    """Leave; another `start` may follow in this process."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def dp_rank() -> int:
    """This rank's number among the data-parallel ranks."""
    return int(parallel_state.get_data_parallel_rank())


def dp_size() -> int:
    """Number of data-parallel ranks."""
    return int(parallel_state.get_data_parallel_world_size())


def sum_over_dp(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over data-parallel ranks, in place."""
    dist.all_reduce(tensor, group=parallel_state.get_data_parallel_group())
    return tensor


def barrier() -> None:
    """Wait for all ranks."""
    dist.barrier()
