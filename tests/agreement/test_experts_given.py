"""Which experts a look inside is told to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from vime.agreement.inside import look_inside_with_experts
from vime.agreement.tokens import select
from vime.types import RoutedExperts, RoutedRows, Sample, VersionSpan


class Told:
    """Notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[int] | None]] = []

    def inside(
        self, sequence: Sequence[int], routed_experts: RoutedExperts | None = None
    ) -> tuple[list[Tensor], Mapping[int, Tensor]]:
        rows = None if routed_experts is None else routed_experts.rows[:, 0, 0].tolist()
        self.asked.append((sequence[0], rows))
        return [], {}


def sampled(first: int, length: int, *, known: bool) -> Sample:
    sample = Sample(tokens=(first,), group_id=first)
    rows = np.full((length, 3, 2), first, np.uint8)
    sample.append_response(
        [1] * length,
        [-1.0] * length,
        version=(VersionSpan(0, 0, length),),
        routed_experts=RoutedRows(0, rows) if known else None,
    )
    return sample


def test_each_sample_is_seen_with_its_own_rows() -> None:
    samples = [sampled(5, 2, known=True), sampled(6, 4, known=False), sampled(7, 3, known=True)]
    tokens = select(samples, None)
    routed = tokens.routed_experts
    assert routed is not None and routed.known.tolist() == [2, 0, 3]
    told = Told()
    look_inside_with_experts(told, tokens, [1, 2, 0], routed)
    assert told.asked == [(6, []), (7, [7, 7, 7]), (5, [5, 5])]


def test_nothing_is_told_where_no_experts_are_known() -> None:
    tokens = select([sampled(5, 2, known=False)], None)
    assert tokens.routed_experts is None
    told = Told()
    look_inside_with_experts(told, tokens, [0], tokens.routed_experts)
    assert told.asked == [(5, None)]
