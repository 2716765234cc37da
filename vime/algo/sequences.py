"""Means and sums over whole sequences, also where a micro-batch or a rank holds only some of their tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sequences:
    """Which sequence each of P tokens belongs to. All tokens here are under mask 1."""

    index: Tensor
    """[P] int64, from 0 to N - 1."""
    counts: Tensor
    """[N] tokens under mask 1 of each whole sequence, those that other ranks hold included, in the values' dtype."""
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None
    """[N] -> [N], differentiable: the sum over ranks that hold parts of the same sequences. None: all is here."""

    def mean(self, values: Tensor) -> Tensor:
        """For each token the mean of `values` [P] over its whole sequence.

        Returns: [P]. The gradient reaches every token of a sequence, on whichever rank it is.
        """
        return torch.index_select(self._sums(values) / self.counts.clamp(min=1), 0, self.index)

    def total(self, values: Tensor) -> Tensor:
        """For each token the sum of `values` [P] over its whole sequence; else as `mean`."""
        return torch.index_select(self._sums(values), 0, self.index)

    def _sums(self, values: Tensor) -> Tensor:
        """[N]"""
        # index_add also where P is 0: a rank without tokens still takes part in the sum, forward and backward.
        sums = values.new_zeros(len(self.counts)).index_add(0, self.index, values)
        return sums if self.sum_over_ranks is None else self.sum_over_ranks(sums)
