"""Differences by place and by probability."""

import numpy as np

from vime.agreement.breakdown import by_position, by_probability


def test_bins_of_places_double_and_hold_every_token() -> None:
    bins = by_position(np.array([1.0, 2.0, 4.0, 8.0, 10.0]), np.array([0, 1, 2, 3, 4]))
    assert [(b.low, b.count, b.mean) for b in bins] == [(0, 1, 1.0), (1, 1, 2.0), (2, 2, 6.0), (4, 1, 10.0)]
    assert [b.count for b in by_position(np.array([3.0]), np.array([0]))] == [1]


def test_bins_of_probabilities_go_up_to_certainty() -> None:
    bins = by_probability(np.array([1.0, 3.0, 5.0]), np.log([0.005, 0.95, 1.0]))
    assert [b.count for b in bins] == [1, 0, 0, 0, 1, 1]
    assert bins[0].mean == 1.0 and bins[-1].mean == 5.0 and bins[1].to_json()["mean"] is None
