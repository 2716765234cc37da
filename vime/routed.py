"""The experts that an engine routed tokens to: as it reports them, and as a batch has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class RoutedRows:
    """Experts as an engine reports them: of the tokens of a request and its answer, from token `start` on.

    The last token of an answer was not fed to the model and has no row.
    """

    start: int
    rows: npt.NDArray[Any]
    """[n, layers, top_k] uint8 or uint16; zeros where a layer has no experts."""


def joined_rows(known: npt.NDArray[Any] | None, new: RoutedRows | None, num_tokens: int) -> npt.NDArray[Any] | None:
    """The rows known so far and behind them those of the new ones that are of later tokens.

    Args: known: [n, layers, top_k] of a sample's first n tokens. num_tokens: that the sample will have.
    Raises: ValueError if the new rows are of other tokens, leave a gap, or differ in shape or type.
    """
    if new is None:
        return known
    have = 0 if known is None else len(known)
    if new.start + len(new.rows) != num_tokens - 1:
        raise ValueError(
            f"routed experts end at token {new.start + len(new.rows) - 1}, but the sample will have {num_tokens} "
            f"tokens, with rows up to token {num_tokens - 2}; the request was of other tokens, or its answer was cut: "
            "then cut the rows as well"
        )
    if not 0 <= new.start <= have:
        raise ValueError(f"routed experts begin at token {new.start}, but they are known of the first {have} only")
    if known is None:
        return new.rows
    if new.rows.dtype != known.dtype or new.rows.shape[1:] != known.shape[1:]:
        raise ValueError(
            f"routed experts of {new.rows.dtype} {new.rows.shape[1:]} cannot follow {known.dtype} {known.shape[1:]}"
        )
    rows: npt.NDArray[Any] = np.concatenate([known, new.rows[have - new.start :]])
    return rows


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts that the engine routed a batch's tokens to: of each sample, those of its first tokens.

    N rows; L decoder layers of the model, as the engine counts them; k experts that a token goes to.
    """

    rows: npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
    """[N, L, k] rows of tokens, sample after sample. Those of a layer without experts are zeros and never read."""
    known: npt.NDArray[np.int64]
    """[B] of each sample, how many of its tokens have rows, from the first on. The others are routed freely."""

    def __post_init__(self) -> None:
        if self.rows.ndim != 3 or self.rows.dtype not in (np.uint8, np.uint16):
            raise ValueError(
                f"RoutedExperts.rows has shape {self.rows.shape} and dtype {self.rows.dtype}, expected [tokens, "
                "layers, top_k] of uint8 or uint16"
            )
        if self.known.ndim != 1 or (self.known < 0).any() or self.known.sum() != len(self.rows):
            raise ValueError(
                f"RoutedExperts.known counts {self.known.sum()} tokens, but there are {len(self.rows)} rows"
            )

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """[B + 1] where each sample's rows begin; the last is N."""
        return np.concatenate([[0], np.cumsum(self.known)]).astype(np.int64)
