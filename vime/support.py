"""What the engine could have sampled at each position, where that is not the whole vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class SamplingSupport:
    """The tokens that could have been sampled in the place of each of T: what top-p, top-k or min-p left. N ids in all.

    A token without ids had the whole vocabulary, or nobody sampled it.
    """

    ids: npt.NDArray[np.int32]
    """[N] token after token, each one's in any order."""
    starts: npt.NDArray[np.int64]
    """[T + 1] token t has ids[starts[t]] to ids[starts[t + 1] - 1]."""

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.ids.dtype != np.int32:
            raise ValueError(
                f"SamplingSupport.ids is of shape {self.ids.shape} and {self.ids.dtype}, expected [N] int32"
            )
        starts = self.starts
        if (
            starts.ndim != 1
            or not len(starts)
            or starts[0]
            or starts[-1] != len(self.ids)
            or (np.diff(starts) < 0).any()
        ):
            raise ValueError(f"SamplingSupport.starts must rise from 0 to the {len(self.ids)} ids")

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> SamplingSupport:
        """From the ids of each token; none: it had the whole vocabulary."""
        lists = list(rows)
        starts = np.concatenate([[0], np.cumsum([len(row) for row in lists])]).astype(np.int64)
        return cls(np.fromiter((i for row in lists for i in row), np.int32, int(starts[-1])), starts)

    @classmethod
    def joined(cls, parts: Sequence[tuple[int, SamplingSupport | None]]) -> SamplingSupport | None:
        """Of tokens one after the other; None if all had the whole vocabulary.

        Args: parts: number of tokens, and their support. Raises: ValueError if the numbers differ.
        """
        if all(support is None for _, support in parts):
            return None
        for n, support in parts:
            if support is not None and len(support.counts) != n:
                raise ValueError(f"a support of {len(support.counts)} tokens came with {n}")
        counts = [np.zeros(n, np.int64) if support is None else support.counts for n, support in parts]
        ids = [support.ids for _, support in parts if support is not None]
        return cls(np.concatenate(ids), np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64))

    def first(self, n: int) -> SamplingSupport:
        """Of the first n tokens: where an answer is cut."""
        starts = self.starts[: n + 1]
        return SamplingSupport(self.ids[: starts[-1]], starts)

    def rows(self) -> list[list[int]]:
        """The ids of each token; the inverse of `of`."""
        return [row.tolist() for row in np.split(self.ids, self.starts[1:-1])] if len(self.starts) > 1 else []

    def check(self, tokens: npt.ArrayLike, mask: npt.ArrayLike) -> None:
        """Args: tokens, mask: [T]. Raises: ValueError if they are not as many, or a token under mask 1 is not in it."""
        ids = np.asarray(tokens, np.int64)
        if len(self.counts) != len(ids):
            raise ValueError(f"support is of {len(self.counts)} tokens, expected {len(ids)}")
        for k in np.flatnonzero(self.lacks(ids) & (np.asarray(mask) != 0))[:1]:
            raise ValueError(f"token {k} (id {ids[k]}) is not among those that could have been sampled")

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """[T] ids of each token."""
        return np.diff(self.starts)

    def lacks(self, tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """[T] whether a token has a support and is not in it."""
        owner = np.repeat(np.arange(len(tokens)), self.counts)
        found = np.bincount(owner, weights=self.ids == tokens[owner], minlength=len(tokens)) > 0
        return (self.counts > 0) & ~found
