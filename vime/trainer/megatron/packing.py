"""A micro-batch as Megatron sees it: sequences end to end, and what attention and the head need to know of them.

T packed tokens, N sequences, P positions whose log-prob is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

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
    """[T] int64: where each token lies in the padded layout. None where attention works on packed sequences."""
    cos: Tensor = None  # type: ignore[assignment]
    """[T, 1, head_dim / 2], computed in float32 and then rounded to the model's dtype, as HF does."""
    sin: Tensor = None  # type: ignore[assignment]
    rows: Tensor = None  # type: ignore[assignment]
    """[P] int64: the packed positions whose hidden state predicts a wanted token."""
    targets: Tensor = None  # type: ignore[assignment]
    """[P] int64: the wanted tokens."""
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Layout:
    """What a model needs of its micro-batches."""

    inv_freq: Tensor
    """[head_dim / 2] float32 RoPE frequencies, on the device."""
    dtype: torch.dtype
    """The model's."""
    padded: bool
    """Lay out padded blocks, for attention kernels that cannot take packed sequences."""


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


def pack(
    tokens: npt.NDArray[np.integer],
    cu_seqlens: npt.NDArray[np.int64],
    samples: Sequence[int],
    wanted_mask: npt.NDArray[np.bool_],
    *,
    layout: Layout,
    temperature: float,
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
    """
    if not samples:
        tokens, cu_seqlens, samples, wanted_mask = tokens[:1], np.array([0, 1]), [0], np.zeros(1, dtype=np.bool_)
    device = layout.inv_freq.device
    starts, ends = cu_seqlens[list(samples)], cu_seqlens[[i + 1 for i in samples]]
    lengths = ends - starts
    cu = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.arange(cu[-1]) - np.repeat(cu[:-1], lengths)
    source = positions + np.repeat(starts, lengths)  # [T] where each packed token comes from
    mask = wanted_mask[source]
    if bad := np.flatnonzero(mask & (positions == 0)).size:
        raise ValueError(f"{bad} samples want a log-prob of their first token, which nothing predicts")
    rows = np.flatnonzero(mask)
    cu_device = torch.from_numpy(cu.astype(np.int32)).to(device)
    longest = int(lengths.max())
    position_ids = torch.from_numpy(positions).to(device)
    angles = position_ids[:, None].float() * layout.inv_freq
    packed = Packed(
        qkv_format="thd",
        cu_seqlens_q=cu_device,
        cu_seqlens_kv=cu_device,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cos=angles.cos()[:, None].to(layout.dtype),
        sin=angles.sin()[:, None].to(layout.dtype),
        rows=torch.from_numpy(rows - 1).to(device),
        targets=torch.from_numpy(tokens[source[rows]].astype(np.int64)).to(device),
        temperature=temperature,
    )
    if layout.padded:
        packed.blocks, place = _blocks(lengths)
        packed.padded_rows = sum(b.rows * b.length for b in packed.blocks)
        packed.place = torch.from_numpy(place).to(device)
    return MicroBatch(
        input_ids=torch.from_numpy(tokens[source].astype(np.int64)).to(device)[None],
        position_ids=position_ids[None],
        packed=packed,
        wanted=source[rows],
        samples=np.repeat(np.asarray(samples, dtype=np.int64), lengths)[rows],
    )


def _blocks(lengths: npt.NDArray[np.int64]) -> tuple[tuple[Block, ...], npt.NDArray[np.int64]]:
    """Blocks of similar lengths, and [T] where each packed token lies in them."""
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
    cu = np.concatenate([[0], np.cumsum(lengths)])
    within = np.arange(cu[-1]) - np.repeat(cu[:-1], lengths)
    return tuple(blocks), np.repeat(first_row, lengths) + within
