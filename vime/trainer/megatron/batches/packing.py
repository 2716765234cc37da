"""A micro-batch as Megatron sees it: sequences end to end, and what attention and the head need to know of them.

T packed tokens, N sequences, P positions whose log-prob is wanted. Under context parallel T, N and P speak of the part
of each sequence that this rank has; padding never counts as wanted, and lies behind the tokens that do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from vime.support import SamplingSupport
from vime.trainer.megatron.aligned import is_fixed
from vime.trainer.megatron.batches.context_parallel import (
    Split,
    gathered_places,
    local_positions,
    split_blocks,
    split_packed,
)
from vime.trainer.megatron.batches.routing_replay import MicroRouting, RoutingPass
from vime.trainer.megatron.batches.support import MicroSupport

# A bucket's sequences are padded to its longest; a new bucket starts where padding would exceed this share. More
# buckets mean more, smaller attention calls: on the CPU a call costs about as much as a few hundred padded tokens.
_MAX_PADDING = 0.25


@dataclass(frozen=True, slots=True)
class Block:
    """Sequences of similar length, padded to a rectangle for one batched attention call."""

    start: int
    """First row in the padded layout."""
    rows: int
    """Number of sequences."""
    length: int
    """Padded length."""


@dataclass
class Packed(PackedSeqParams):  # type: ignore[misc]
    """Megatron's packed-sequence parameters, with RoPE's tables and the padded layout computed once for all layers."""

    blocks: tuple[Block, ...] = ()
    padded_rows: int = 0
    place: Tensor | None = None
    """[T of all ranks] int64: where each key lies in the padded layout. None where attention works on packed sequences.
    """
    split: Split | None = None
    """Context parallel: which queries are this rank's."""
    cos: Tensor = None  # type: ignore[assignment]
    """[T, 1, rotated part of a head / 2], computed in float32 and then rounded to the model's dtype, as HF does."""
    sin: Tensor = None  # type: ignore[assignment]
    rows: Tensor = None  # type: ignore[assignment]
    """[P] int64: the packed positions whose hidden state predicts a wanted token."""
    targets: Tensor = None  # type: ignore[assignment]
    """[P] int64: the wanted tokens."""
    temperature: float = 1.0
    support: MicroSupport | None = None
    """[P] what the wanted tokens were sampled from; None: from the whole vocabulary."""
    routing: MicroRouting | None = None
    """What routers are told to choose; None: they are free."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a model needs of its micro-batches."""

    inv_freq: Tensor
    """[rotated part of a head / 2] float32 RoPE frequencies, on the device."""
    dtype: torch.dtype
    """The model's."""
    padded: bool
    """Lay out padded blocks, for attention kernels that cannot take packed sequences."""
    rope_factor: float = 1.0
    """What cosine and sine are multiplied by."""
    cp_rank: int = 0
    cp_size: int = 1
    """Context-parallel ranks: each has two chunks of every sequence."""
    multiple: int = 1
    """T is padded to a multiple of this: the tensor-parallel size where sequence parallel splits T over its ranks."""
    group: int = 1
    """Micro-batches come in multiples of this: virtual pipeline stages take so many in a row."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass: inputs on the device, and where its wanted tokens lie in the train batch."""

    input_ids: Tensor
    """[1, T] int64"""
    position_ids: Tensor
    """[1, T] int64"""
    packed: Packed
    wanted: npt.NDArray[np.int64]
    """[P] positions in the batch's token columns."""
    samples: npt.NDArray[np.int64]
    """[P] sample index of each wanted token."""
    members: npt.NDArray[np.int64]
    """[samples] ascending: all that are here, the same on every rank that has a part of them. At least one."""


def pack(
    tokens: npt.NDArray[np.integer],
    cu_seqlens: npt.NDArray[np.int64],
    samples: Sequence[int],
    wanted_mask: npt.NDArray[np.bool_],
    *,
    layout: Layout,
    temperature: float,
    support: SamplingSupport | None = None,
    routing: RoutingPass | None = None,
) -> MicroBatch:
    """Lay the samples end to end.

    Args:
        tokens: [all tokens of the batch] ids.
        cu_seqlens: [B + 1] where each sample starts in `tokens`.
        samples: the samples of this micro-batch, in order. None at all gives one token of which nothing is wanted: a
            rank that has nothing to do still takes part.
        wanted_mask: [all tokens] True where a log-prob is wanted; never at a sample's first token.
        layout: what the model needs of a micro-batch.
        temperature: the log-probs' temperature.
        support: [all tokens] what each was sampled from; None: from the whole vocabulary.
        routing: what routers of experts are told to choose, and where to note what they chose; None: they are free.
    """
    if not samples:
        support, routing = None, None
        tokens, cu_seqlens, samples, wanted_mask = tokens[:1], np.array([0, 1]), [0], np.zeros(1, dtype=np.bool_)
    device, cp_size = layout.inv_freq.device, layout.cp_size
    starts, ends = cu_seqlens[list(samples)], cu_seqlens[[i + 1 for i in samples]]
    if bad := int(wanted_mask[starts].sum()):
        raise ValueError(f"{bad} samples want a log-prob of their first token, which nothing predicts")
    real, lengths = _padded_lengths(ends - starts, layout)
    filler = np.zeros(len(lengths) - len(starts), dtype=np.int64)
    starts, numbers = np.append(starts, filler), np.append(np.asarray(samples, dtype=np.int64), filler)
    local = lengths // cp_size
    positions = local_positions(lengths, layout.cp_rank, cp_size)
    source = positions + np.repeat(starts, local)  # [T] where each packed token comes from, unless it is padding
    left = np.repeat(real, local) - positions  # tokens from here to the sequence's end; none where this is padding
    ids = np.where(left > 0, tokens[np.minimum(source, len(tokens) - 1)], 0)
    follows = left > 1  # the sequence has a next token
    rows = np.flatnonzero(follows & wanted_mask[np.where(follows, source + 1, 0)])
    wanted = source[rows] + 1
    cu_device = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)
    position_ids = torch.from_numpy(positions).to(device)
    angles = position_ids[:, None].float() * layout.inv_freq
    packed = Packed(
        qkv_format="thd",
        cu_seqlens_q=cu_device,
        cu_seqlens_kv=cu_device,
        max_seqlen_q=int(lengths.max()),
        max_seqlen_kv=int(lengths.max()),
        cos=(angles.cos() * layout.rope_factor)[:, None].to(layout.dtype),
        sin=(angles.sin() * layout.rope_factor)[:, None].to(layout.dtype),
        rows=torch.from_numpy(rows).to(device),
        targets=torch.from_numpy(tokens[wanted].astype(np.int64)).to(device),
        temperature=temperature,
        support=None if support is None else MicroSupport.of(support, wanted, device),
    )
    if routing is not None:
        packed.routing = routing.micro_batch(tuple(samples), np.repeat(numbers, local), positions, left > 0)
    _lay_out_attention(packed, lengths, layout)
    return MicroBatch(
        input_ids=torch.from_numpy(ids.astype(np.int64)).to(device)[None],
        position_ids=position_ids[None],
        packed=packed,
        wanted=wanted,
        samples=np.repeat(numbers, local)[rows],
        members=np.unique(np.asarray(samples, dtype=np.int64)),
    )


def _padded_lengths(
    lengths: npt.NDArray[np.int64], layout: Layout
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Real and padded lengths of the sequences; the last may be padding alone, to fill up T."""
    unit = 2 * layout.cp_size if layout.cp_size > 1 else 1
    padded = -(-lengths // unit) * unit
    if rest := -int(padded.sum()) % math.lcm(unit, layout.cp_size * layout.multiple):
        return np.append(lengths, 0), np.append(padded, rest)
    return lengths, padded


def _lay_out_attention(packed: Packed, lengths: npt.NDArray[np.int64], layout: Layout) -> None:
    """What the attention kernel in use needs to know of the sequences."""
    if is_fixed():
        return  # nothing: it goes sequence by sequence
    rank, size, device = layout.cp_rank, layout.cp_size, layout.inv_freq.device
    if not layout.padded:
        packed.split = split_packed(lengths, rank, size, device) if size > 1 else None
        return
    packed.blocks, first_row = _blocks(lengths)
    packed.padded_rows = sum(b.rows * b.length for b in packed.blocks)
    packed.place = torch.from_numpy(gathered_places(lengths, first_row, size)).to(device)
    if size > 1:
        blocks = [(b.start, b.rows, b.length) for b in packed.blocks]
        packed.split = split_blocks(lengths, blocks, first_row, rank, size, device)


def _blocks(lengths: npt.NDArray[np.int64]) -> tuple[tuple[Block, ...], npt.NDArray[np.int64]]:
    """Blocks of similar lengths, and [N] where each sequence starts in them."""
    order = np.argsort(-lengths, kind="stable")
    blocks: list[Block] = []
    first_row = np.empty(len(lengths), dtype=np.int64)
    start = begin = 0
    real = 0
    for k, i in enumerate([*order, -1]):
        rows = k - begin
        widest = int(lengths[order[begin]])
        ends = i < 0 or (rows + 1) * widest * (1 - _MAX_PADDING) > real + int(lengths[i])
        if rows and ends:
            first_row[order[begin:k]] = start + np.arange(rows) * widest
            blocks.append(Block(start, rows, widest))
            start += rows * widest
            begin, real = k, 0
        if i >= 0:
            real += int(lengths[i])
    return tuple(blocks), first_row
