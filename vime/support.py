"""What the engine could have sampled at each position, where that is not the whole vocabulary."""

from __future__ import annotations

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

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """[T] ids of each token."""
        return np.diff(self.starts)

    def lacks(self, tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """[T] whether a token has a support and is not in it."""
        owner = np.repeat(np.arange(len(tokens)), self.counts)
        found = np.bincount(owner, weights=self.ids == tokens[owner], minlength=len(tokens)) > 0
        return (self.counts > 0) & ~found
