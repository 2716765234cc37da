"""The distributed optimizer's state from a checkpoint: each rank reads the numbers that it updates, and no others.

megatron-core 0.16.1 reads the state of all parameters on every rank, and keeps the part that is the rank's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from vime.trainer.megatron.checkpoints.gathered_state import KEYS
from vime.trainer.megatron.checkpoints.stored_tensors import PIECE, Box, StoredTensors
from vime.trainer.megatron.nn.model import single_optimizers

OPTIMIZER_STATE = "optimizer.state."
"""How the keys of an optimizer's tensors begin."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What a rank updates of a parameter, as far as it lies in one box of a stored tensor."""

    optimizer: DistributedOptimizer
    parameter: Tensor
    key: str
    stored_shape: tuple[int, ...]
    is_padded: bool
    """Whether the stored tensor may have more or less padding than this run's."""
    box: Box
    begin: int
    """Where in the flat box."""
    place: slice
    """Where in the rank's tensors of the parameter."""

    def keys(self, prefix: str) -> dict[str, str]:
        """Of the stored tensors, by what Megatron calls them."""
        return {name: f"{prefix}{OPTIMIZER_STATE}{name}.{self.key}" for name in KEYS}

    def check(self, stored: StoredTensors, prefix: str) -> None:
        """Raises: ValueError if they are not there, or of another shape."""
        for key in self.keys(prefix).values():
            if key not in stored.keys():
                raise ValueError(f"it has no {key}")
            if stored.shape(key) != self.stored_shape and not self.is_padded:
                raise ValueError(f"{key} is of {stored.shape(key)}, but {self.stored_shape} in this run")

    def read(self, stored: StoredTensors, prefix: str, piece: int) -> None:
        """Into the tensors that are worked on."""
        tensors = self.optimizer._get_main_param_and_optimizer_states(self.parameter)
        for name, key in self.keys(prefix).items():
            out = tensors[name].detach().view(-1)[self.place]
            if self.is_padded:
                out.zero_()
            filled = stored.read_range(key, self.box, self.begin, out, piece=piece)
            if filled != out.numel() and not self.is_padded:
                raise ValueError(f"it has {filled} of {out.numel()} numbers of {key}")


class OwnState:
    """What this rank needs of an optimizer's state; not collective.

    Args:
        optimizer: made of distributed optimizers, with its state allocated when `read` is called.
        models: sharded states of the model's chunks, before anything is loaded into them.
    """

    def __init__(self, optimizer: MegatronOptimizer, models: Mapping[str, Any]) -> None:
        entries = {entry.data: entry for entry in nested_values(models)}
        self._parts = [
            part
            for chained in single_optimizers(optimizer)
            for parameter, place in _owned(chained)
            for part in _parts(chained, parameter, place, entries[parameter])
        ]

    def check(self, stored: StoredTensors, *, prefix: str = "") -> None:
        """Args: prefix: of all keys. Raises: ValueError if something is not stored, or of another shape."""
        for part in self._parts:
            part.check(stored, prefix)

    @torch.no_grad()
    def read(self, stored: StoredTensors, *, prefix: str = "", piece: int = PIECE) -> None:
        """Put it in place.

        Args: piece: numbers to hold at a time.
        Raises: ValueError, OSError or RuntimeError where it cannot be read.
        """
        for part in self._parts:
            part.read(stored, prefix, piece)


def _owned(optimizer: DistributedOptimizer) -> Iterator[tuple[Tensor, slice]]:
    """Parameters that this rank updates, and which part of the flat parameter."""
    for by_dtype in optimizer.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, slice(ranges["param"].start, ranges["param"].end)


def _parts(optimizer: DistributedOptimizer, parameter: Tensor, own: slice, entry: Any) -> Iterator[_Part]:
    """One for each stored tensor, or box of one, that a parameter's own part overlaps."""
    shape = torch.empty(parameter.shape, dtype=torch.float32, device="meta")
    if isinstance(entry, ShardedTensorFactory):
        cut = list(nested_values(replace(entry, data=shape).build()))
    else:
        cut = [replace(entry, data=shape, dtype=shape.dtype)]
    for box in cut:
        # What a factory cuts a tensor into are views of it, so they tell where they lie.
        if not isinstance(box, ShardedTensor) or not box.data.is_contiguous():
            raise ValueError(f"{box.key}: this optimizer state cannot be cut by ranks")
        at = box.data.storage_offset()
        start, stop = max(own.start, at), min(own.stop, at + prod(box.local_shape))
        if start < stop:
            yield _Part(
                optimizer,
                parameter,
                box.key,
                tuple(box.global_shape),
                box.allow_shape_mismatch,
                Box(tuple(box.global_offset), (1,) * box.prepend_axis_num + tuple(box.local_shape)),
                start - at,
                slice(start - own.start, stop - own.start),
            )


def merged_in_place(entry: Any) -> Any:
    """A model's entry whose cut tensors are loaded where they are; megatron-core makes another of all it has cut."""
    if not isinstance(entry, ShardedTensorFactory):
        return entry
    whole, merge = entry.data, entry.merge_fn
    storage = whole.untyped_storage().data_ptr()

    def merged(pieces: Any) -> Any:
        is_in_place = all(piece.untyped_storage().data_ptr() == storage for piece in nested_values(pieces))
        return whole if is_in_place else merge(pieces)

    return replace(entry, merge_fn=merged)
