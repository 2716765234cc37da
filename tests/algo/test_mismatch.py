import math

import numpy as np
import pytest

from vime.algo.mismatch import log_prob_abs_diff

ON = np.ones(4, np.uint8)


def test_mean_is_per_trajectory_and_the_tail_is_over_tokens():
    got = log_prob_abs_diff(
        np.array([-1.0, -1, -1, -1]), np.array([-1.1, -0.9, -1.1, -2]), ON, np.array([3, 3, 3, 8]), 2
    )
    assert got.mean == pytest.approx((0.1 + 1.0) / 2)
    assert got.max == pytest.approx(1.0)
    assert got.p99 == pytest.approx(0.1 + 0.97 * 0.9)  # linear between the third and fourth of four


def test_the_order_of_gathered_tokens_does_not_matter():
    train, rollout, index = np.array([-1.0, -2, -3, -4]), np.array([-1.5, -2, -2, -4]), np.array([0, 1, 0, 1])
    order = [2, 0, 3, 1]
    assert log_prob_abs_diff(train, rollout, ON, index, 2) == log_prob_abs_diff(
        train[order], rollout[order], ON, index[order], 2
    )


def test_masked_nan_does_not_count_but_a_trained_nan_shows():
    nan = np.array([math.nan, -1.0, -1.0, -1.0])
    assert log_prob_abs_diff(nan, nan, np.array([0, 1, 1, 1]), np.zeros(4, int), 1) == (0, 0, 0)
    assert all(math.isnan(x) for x in log_prob_abs_diff(nan, nan, ON, np.zeros(4, int), 1))


def test_nothing_compared_is_nan_not_zero():
    got = log_prob_abs_diff(np.zeros(4), np.zeros(4), np.zeros(4), np.zeros(4, int), 1)
    assert all(math.isnan(x) for x in got)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="four columns"):
        log_prob_abs_diff(np.zeros(4), np.zeros(3), ON, np.zeros(4, int), 1)
    with pytest.raises(ValueError, match="n_global is 0"):
        log_prob_abs_diff(np.zeros(4), np.zeros(4), ON, np.zeros(4, int), 0)
