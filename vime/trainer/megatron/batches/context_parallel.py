"""Context parallel: how sequences are split over ranks, and how attention puts keys and values together again.

Each sequence is padded to 2 * size chunks of equal length, and rank r has chunks r and 2 * size - 1 - r (zigzag): under
a causal mask every rank then has the same work. Attention gathers the keys and values of all ranks.

N sequences, T all tokens of a micro-batch with padding, L = T / size tokens of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SplitBlock:
    """The part of a block (see `packing.Block`) that one rank asks attention for."""

    start: int
    """First of its rows in the rank's padded layout of queries."""
    length: int
    """Padded length of a sequence's queries."""
    mask: Tensor
    """[rows, 1, length, padded length of the keys] True where a query sees a key."""


@dataclass(frozen=True, slots=True)
class Split:
    """What attention needs beside the layout of the whole sequences. One half is set, by the kernel in use."""

    blocks: tuple[SplitBlock, ...] = ()
    padded_rows: int = 0
    place: Tensor | None = None
    """[L] int64: where each query lies in the padded layout of queries."""
    seen: Tensor | None = None
    """[sum of seen keys] int64: for each chunk of queries, the gathered rows of its keys: all up to its own last."""
    cu_seqlens_q: Tensor | None = None
    """[2 N + 1] int32: where each chunk of queries starts."""
    cu_seqlens_k: Tensor | None = None
    """[2 N + 1] int32: where the keys of each chunk start in `seen`."""
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0


def local_positions(lengths: Ints, rank: int, size: int) -> Ints:
    """[L] the position in its sequence of each token that a rank has, sequence after sequence.

    Args: lengths: [N] padded to multiples of 2 * size (of anything where size is 1).
    """
    within, each = _within(lengths // size)
    if size == 1:
        return within
    chunk = np.repeat(lengths // (2 * size), each)
    return np.where(within < chunk, within + rank * chunk, within + (2 * size - 2 - rank) * chunk)


def gathered_places(lengths: Ints, first_place: Ints, size: int) -> Ints:
    """[T] where each row of keys gathered from all ranks belongs, if sequence i starts at first_place[i]."""
    starts = np.repeat(first_place, lengths // size)
    return np.concatenate([starts + local_positions(lengths, rank, size) for rank in range(size)])


def split_blocks(
    lengths: Ints, blocks: Sequence[tuple[int, int, int]], first_row: Ints, rank: int, size: int, device: torch.device
) -> Split:
    """For attention over padded blocks.

    Args:
        lengths: [N] padded.
        blocks: (first row, sequences, padded length) of each block of whole sequences.
        first_row: [N] where each sequence starts in their layout.
    """
    within, each = _within(lengths // size)
    place = np.repeat(first_row // size, each) + within
    rows = sum(number * length for _, number, length in blocks) // size
    # A query that is only padding sees the first key: a softmax over nothing would be NaN.
    position = np.zeros(rows, dtype=np.int64)
    position[place] = local_positions(lengths, rank, size)
    positions = torch.from_numpy(position).to(device)
    out = []
    for start, number, length in blocks:
        mine = positions[start // size : (start + number * length) // size].view(number, 1, length // size, 1)
        out.append(SplitBlock(start // size, length // size, mine >= torch.arange(length, device=device)))
    return Split(blocks=tuple(out), padded_rows=rows, place=torch.from_numpy(place).to(device))


def split_packed(lengths: Ints, rank: int, size: int, device: torch.device) -> Split:
    """For attention kernels that take packed sequences: every chunk of queries is a sequence with keys of its own."""
    cu = np.concatenate([[0], np.cumsum(lengths)])
    row_of = np.empty(cu[-1], dtype=np.int64)
    row_of[gathered_places(lengths, cu[:-1], size)] = np.arange(cu[-1])
    chunk = lengths // (2 * size)
    ends = np.stack([(rank + 1) * chunk, (2 * size - rank) * chunk], 1).reshape(-1)
    keys = [row_of[start : start + end] for start, end in zip(np.repeat(cu[:-1], 2), ends, strict=True)]

    def offsets(sizes: Ints) -> Tensor:
        return torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)).to(device)

    return Split(
        seen=torch.from_numpy(np.concatenate(keys)).to(device),
        cu_seqlens_q=offsets(np.repeat(chunk, 2)),
        cu_seqlens_k=offsets(ends),
        max_seqlen_q=int(chunk.max()),
        max_seqlen_k=int(ends.max()),
    )


def _within(lengths: Ints) -> tuple[Ints, Ints]:
    """[sum] 0, 1, ... inside each run, and the lengths of the runs (to repeat by)."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return np.arange(lengths.sum()) - np.repeat(starts, lengths), lengths
