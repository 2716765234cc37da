"""Log-probs over the tokens that the engine could have sampled, where top-p, top-k or min-p left out the others.

P positions, N ids of all their supports, C positions of a chunk, V vocabulary or this rank's part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vime.support import SamplingSupport

# In the place of logits outside. Its exp is 0, and unlike minus infinity its product with 0 is, too; float32 and bf16
# hold it, at a temperature of 0.01 as well.
_OUTSIDE = -1e30


@dataclass(frozen=True, slots=True)
class MicroSupport:
    """Of the wanted tokens of a micro-batch. A position without ids has the whole vocabulary."""

    rows: Tensor
    """[N] int64, ascending: the position that each id belongs to."""
    ids: Tensor
    """[N] int64"""
    whole: Tensor
    """[P, 1] bool"""
    starts: npt.NDArray[np.int64]
    """[P + 1] where each position's ids begin; on the host."""

    @classmethod
    def of(cls, support: SamplingSupport, wanted: npt.NDArray[np.int64], device: torch.device) -> MicroSupport:
        """Args: wanted: [P] places in the batch."""
        counts = support.counts[wanted]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        rows = np.repeat(np.arange(len(wanted)), counts)
        places = np.repeat(support.starts[wanted] - starts[:-1], counts) + np.arange(starts[-1])

        def put(values: npt.NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(values).to(device, non_blocking=True)

        return cls(put(rows), put(support.ids[places].astype(np.int64)), put(counts[:, None] == 0), starts)

    def narrowed(self, logits: Tensor, positions: slice, first: int) -> Tensor:
        """[C, V] the logits, those outside the support so low that they have no part in anything.

        Nothing waits for the device, and nothing of the size of more than a chunk's logits is made.

        Args:
            logits: [C, V] of the positions `positions`.
            first: the token that the first column stands for.
        """
        span = slice(int(self.starts[positions.start]), int(self.starts[positions.stop]))
        columns, width = self.ids[span] - first, logits.shape[1]
        # Ids in other ranks' parts of the vocabulary go to a column that is cut off again.
        columns = torch.where((columns >= 0) & (columns < width), columns, width)
        inside = logits.new_zeros(len(logits), width + 1, dtype=torch.bool)
        inside[self.rows[span] - positions.start, columns] = True
        return torch.where(inside[:, :width] | self.whole[positions], logits, _OUTSIDE)
