"""Differences of two columns of log-probs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vime.agreement.difference import difference


def test_means_are_of_trajectories_and_extremes_of_tokens() -> None:
    sampler = np.array([-1.0, -1.0, -2.0])
    other = np.array([-1.5, -0.5, -1.0])  # the first two are one trajectory
    d = difference(other, sampler, np.array([4, 4, 7]))
    assert d.mean == pytest.approx((0.5 + 1.0) / 2) and d.max == 1.0 and d.num_tokens == 3
    assert d.signed == pytest.approx((0.0 + 1.0) / 2)
    k3 = [math.exp(x) - 1 - x for x in (-0.5, 0.5, 1.0)]
    assert d.k3 == pytest.approx(((k3[0] + k3[1]) / 2 + k3[2]) / 2)


def test_equal_columns_differ_by_nothing_and_no_columns_by_nobody_knows() -> None:
    same = np.array([-1.0, -3.0])
    assert difference(same, same, np.array([0, 1])).to_json() == {
        **dict.fromkeys(("mean", "p99", "max", "signed", "k3"), 0.0),
        "num_tokens": 2,
    }
    none = difference(same[:0], same[:0], np.array([], np.int64))
    assert none.num_tokens == 0 and none.to_json()["mean"] is None


def test_a_token_the_other_finds_far_likelier_stays_finite() -> None:
    d = difference(np.array([0.0]), np.array([-1000.0]), np.array([0]))
    assert math.isfinite(d.k3) and d.k3 > 1e300
