import math

import numpy as np
import pytest

from vime.algo.mismatch import log_prob_abs_diff, ratio_figures

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


def test_figures_of_the_ratio_by_hand():
    # Ratios 1/2, 3/2 of one sample, 1 of another that is masked in part.
    train = np.log([0.25, 0.75, 0.5, math.nan])
    figures = ratio_figures(
        train, np.log([0.5] * 4), [1, 1, 1, 0] * ON, np.array([0, 0, 1, 1]), np.array([5, 5, 6, 6]), 2
    )
    k3 = [-0.5 - math.log(0.5), 0.5 - math.log(1.5), 0]
    assert figures.k3_kl == pytest.approx(((k3[0] + k3[1]) / 2 + k3[2]) / 2)
    assert figures.ratio == pytest.approx(1)
    assert figures.ess == pytest.approx(3**2 / (3 * (0.25 + 2.25 + 1)))
    assert figures.sequence_ess == pytest.approx((0.75 + 1) ** 2 / (2 * (0.75**2 + 1)))


def test_the_ratio_is_1_and_k3_the_kl_in_expectation():
    q, p = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    tokens = np.repeat([0, 1, 2], [50, 30, 20])  # as often as the engine samples them
    got = ratio_figures(np.log(p)[tokens], np.log(q)[tokens], np.ones(100), np.zeros(100), np.zeros(100), 1)
    assert got.ratio == pytest.approx(1)
    assert got.k3_kl == pytest.approx((q * np.log(q / p)).sum())
    assert got.ess == pytest.approx(1 / (p * p / q).sum())


def test_equal_policies_waste_no_sample_and_far_ones_stay_finite():
    same = ratio_figures(-ON.astype(float), -ON.astype(float), ON, ON, np.arange(4), 1)
    assert same == (0, 1, 1, 1)
    far = ratio_figures(np.array([-1.0, -2, -1, -1]), np.array([-2000.0, -1, -1, -1]), ON, ON, np.arange(4), 1)
    assert np.isfinite(far).all() and far.ess == far.sequence_ess == pytest.approx(1 / 4)
    assert np.isnan(ratio_figures(ON, ON, ON * 0, ON, ON, 1)).all()
