"""The distributed optimizer's state for a checkpoint: whole on the ranks that write it, and nowhere else.

megatron-core 0.16.1 gathers it on every data-parallel rank, a whole gradient buffer at a time through the device: the
host's memory holds it as often as there are ranks, and a device twice the size of the buffer. Here the first rank alone
gets it, in pieces; where a rank shares its parameters with no other, the optimizer's own tensors are handed out.
tests/trainer/megatron/checkpoints/test_gathered_state.py compares with megatron-core's.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

KEYS = ("param", "exp_avg", "exp_avg_sq")
_MARK = "_vime_fix"
_PIECE = 1 << 26
"""Numbers of a shard that travel at a time, 256 MiB."""


def install() -> None:
    """Put it in the place of megatron-core's for saving; a second call does nothing."""
    cls = DistributedOptimizer
    if hasattr(cls.get_parameter_state_dp_zero, _MARK):
        return
    original = cls.get_parameter_state_dp_zero

    @functools.wraps(original)
    def get_parameter_state_dp_zero(
        self: Any, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False
    ) -> Any:
        if empty_data:  # to load into: `own_state` reads it
            return None
        return gathered_state(self)

    setattr(get_parameter_state_dp_zero, _MARK, True)
    cls.get_parameter_state_dp_zero = get_parameter_state_dp_zero


def is_shared(optimizer: DistributedOptimizer) -> bool:
    """Whether the state is spread over several ranks; what `gathered_state` gives is a copy then."""
    return bool(optimizer.data_parallel_group.size() > 1)


def gathered_state(optimizer: Any, *, piece: int = _PIECE) -> dict[Any, Any] | None:
    """Of each buffer and dtype, flat float32 tensors of all parameters by `KEYS`. Collective over the group's ranks.

    Args: piece: numbers of a shard that travel at a time.
    Returns: megatron-core's dict on the group's first rank, None on the others.
    """
    group = optimizer.data_parallel_group
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for number, ranges in enumerate(optimizer.gbuf_ranges):
        buffer = optimizer.buffers[number]
        if is_shared(optimizer):
            state[number] = {kind: world_tensors(optimizer, buffer, buckets, piece) for kind, buckets in ranges.items()}
        else:
            state[number] = {kind: own_tensors(optimizer, buffer) for kind in ranges}
    return state if group.rank() == 0 else None


class _OwnTensors:
    """Slices of a flat tensor that was never made: each is one parameter's own tensor."""

    def __init__(self, by_start: Mapping[int, Tensor]) -> None:
        self._by_start = by_start

    def __getitem__(self, place: slice) -> Tensor:
        return self._by_start[place.start]


def own_tensors(optimizer: Any, buffer: Any) -> dict[str, Any]:
    """By `KEYS` what gives each parameter's tensor for its place in the buffer; no other rank has a part."""
    states = {
        start: optimizer._get_main_param_and_optimizer_states(parameter)
        for parameter, (start, _, _) in buffer.param_index_map.items()
    }
    return {
        **{key: _OwnTensors({start: s[key].detach().view(-1) for start, s in states.items()}) for key in KEYS},
        "numel_unpadded": buffer.numel_unpadded,
    }


def world_tensors(optimizer: Any, buffer: Any, buckets: Any, piece: int) -> dict[str, Any]:
    """By `KEYS` the flat tensor of a buffer, without padding, on the group's first rank; empty ones on the others."""
    group = optimizer.data_parallel_group
    first = group.rank() == 0
    world = {key: torch.zeros(buffer.numel_unpadded if first else 0, dtype=torch.float32) for key in KEYS}
    begin = 0
    for bucket, ranges in zip(buffer.buckets, buckets, strict=True):
        per_rank = bucket.grad_data.numel() // group.size()
        whole = {key: tensor[begin : begin + bucket.numel_unpadded] for key, tensor in world.items()}
        for key in KEYS:
            shard = _shard(optimizer, ranges["param_map"], key, per_rank)
            for start in range(0, per_rank, piece):
                _gather(shard[start : start + piece], whole[key], start, per_rank, group)
        begin += bucket.numel_unpadded
    return {**world, "numel_unpadded": buffer.numel_unpadded}


def _shard(optimizer: Any, parameters: Mapping[Any, Any], key: str, size: int) -> Tensor:
    """[size] on the host: this rank's part of a bucket; 0 where padding is."""
    shard = torch.zeros(size, dtype=torch.float32)
    for parameter, places in parameters.items():
        place = places["gbuf_local"]
        shard[place.start : place.end].copy_(optimizer._get_main_param_and_optimizer_states(parameter)[key].detach())
    return shard


def _gather(part: Tensor, whole: Tensor, start: int, per_rank: int, group: Any) -> None:
    """Write the parts of all ranks into place on the first. Args: start: of the part in each rank's `per_rank`."""
    part = part.to(torch.cuda.current_device())
    received = [torch.empty_like(part) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(part, received, dist.get_global_rank(group, 0), group)
    for rank, values in enumerate(received or ()):
        place = whole[rank * per_rank + start :][: len(values)]  # shorter where the bucket's padding begins
        place.copy_(values[: len(place)])
