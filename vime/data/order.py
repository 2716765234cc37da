"""Which prompt comes next: epochs, shuffles, and mixtures by weight. All of it follows from a few counters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class PromptOrder:
    """An endless sequence of prompt indices.

    Without weights the parts are one long list: every prompt comes once an epoch, in order or in a seeded shuffle that
    is new each epoch. With weights every draw first chooses a part: the one that is furthest behind its share of the
    draws so far, the first of equals. So any stretch of draws has the parts in their shares, give or take a prompt or
    two. Each part is then gone through as a list of its own, with epochs and shuffles of its own. An epoch of the
    mixture is as many draws as there are prompts in all parts together: a part whose share is larger than its size is
    repeated within it, another is not used up.

    Args:
        sizes: prompts of each part, at least one each.
        weights: shares of the parts, above 0, of any sum; None: no mixing.
        shuffle: shuffle anew each epoch.
        seed: of the shuffle, not negative.
    """

    def __init__(
        self, sizes: Sequence[int], *, weights: Sequence[float] | None = None, shuffle: bool, seed: int
    ) -> None:
        if not sizes or min(sizes) < 1:
            raise ValueError(f"the parts have {list(sizes)} prompts; each needs at least one")
        if seed < 0:
            raise ValueError(f"the shuffle's seed is {seed}; it may not be negative")
        if weights is not None and (len(weights) != len(sizes) or min(weights) <= 0):
            raise ValueError(f"the weights {list(weights)} do not fit {len(sizes)} parts; give each one above 0")
        self._sizes = list(sizes) if weights is not None else [sum(sizes)]
        total = sum(weights) if weights is not None else 1.0
        self._shares = [weight / total for weight in weights] if weights is not None else [1.0]
        self._starts = [0, *itertools.accumulate(self._sizes)]
        self._shuffle, self._seed = shuffle, seed
        self._drawn = [0] * len(self._sizes)
        self._shuffled: dict[int, tuple[int, npt.NDArray[np.int64]]] = {}  # part -> its epoch, its order in that

    @property
    def drawn(self) -> list[int]:
        """Draws of each part so far; the whole position."""
        return list(self._drawn)

    @property
    def epoch_size(self) -> int:
        """Draws in an epoch."""
        return self._starts[-1]

    def move_to(self, drawn: Sequence[int]) -> None:
        """Continue from a position. Raises: ValueError if it is none of this order's."""
        if len(drawn) != len(self._sizes) or min(drawn) < 0:
            raise ValueError(f"a position {list(drawn)} for {len(self._sizes)} parts")
        self._drawn = list(drawn)

    def draw(self) -> tuple[int, int]:
        """(epoch, index) of the next prompt: into all prompts, the parts one after another; the epoch of its part."""
        n = sum(self._drawn) + 1
        behind = [share * n - count for share, count in zip(self._shares, self._drawn, strict=True)]
        part = behind.index(max(behind))
        epoch, offset = divmod(self._drawn[part], self._sizes[part])
        self._drawn[part] += 1
        return epoch, self._starts[part] + (int(self._order(part, epoch)[offset]) if self._shuffle else offset)

    def _order(self, part: int, epoch: int) -> npt.NDArray[np.int64]:
        known = self._shuffled.get(part)
        if known is None or known[0] != epoch:
            # RandomState over a seeded MT19937 is the one numpy stream that is promised never to change: a resumed run
            # under a newer numpy must not see another order.
            entropy = [self._seed, epoch, part] if part else [self._seed, epoch]
            random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(entropy)))
            known = self._shuffled[part] = (epoch, random.permutation(self._sizes[part]).astype(np.int64))
        return known[1]
