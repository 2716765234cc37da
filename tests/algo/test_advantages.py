import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.algo.advantages import group_advantages


def test_the_std_is_of_the_sample():
    # mean 1/2, squared deviations 4 * 1/4, over n - 1 = 3: std 1/sqrt(3); 0.5 * sqrt(3) = 0.866. By n it would be 1.
    got = group_advantages([1, 0, 0, 1], [4, 4, 4, 4], std_eps=0.0)
    np.testing.assert_allclose(got, np.array([1, -1, -1, 1]) * math.sqrt(3) / 2)


def test_uneven_interleaved_groups_do_not_mix():
    rewards, groups = [1.0, 10.0, 3.0, 20.0, 5.0], [7, -2, 7, -2, 7]
    np.testing.assert_allclose(group_advantages(rewards, groups, std_eps=None), [-2, -5, 0, 5, 2])


def test_a_group_of_one_and_equal_rewards_get_exactly_zero():
    assert group_advantages([3.0], [0]).tolist() == [0]
    assert group_advantages([0.1] * 3 + [0.7] * 7, [0] * 3 + [1] * 7, std_eps=0.0).tolist() == [0] * 10


def test_siblings_count_once():
    with_siblings = group_advantages([1, 1, 1, 0, 0], [0] * 5, [8, 8, 8, 9, 10])
    np.testing.assert_allclose(with_siblings, group_advantages([1, 0, 0], [0] * 3)[[0, 0, 0, 1, 2]])


finite = st.floats(-100, 100, allow_nan=False)


@given(st.lists(st.tuples(finite, st.integers(0, 3)), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_groups_are_centred_and_order_does_not_matter(rows, random):
    rewards, groups = np.array([r for r, _ in rows]), np.array([g for _, g in rows])
    got = group_advantages(rewards, groups)
    for g in set(groups.tolist()):
        # The rounding of the mean is divided by the std; 1e-6 bounds that from below.
        assert abs(got[groups == g].sum()) < 1e-5
    order = random.sample(range(len(rows)), len(rows))
    np.testing.assert_allclose(group_advantages(rewards[order], groups[order]), got[order], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        group_advantages(rewards + 5, groups, std_eps=None), _centred(rewards, groups), atol=1e-9
    )


def _centred(rewards, groups):
    return [r - rewards[groups == g].mean() for r, g in zip(rewards, groups, strict=True)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], [0, 0]), "must be"),
        (([1.0, math.nan], [0, 0]), "reward of sample 1 is nan"),
        (([1.0, 0.0], [0, 0], [3, 3]), "samples 0 and 1 belong to trajectory 3 but their rewards are 1.0 and 0.0"),
        (([1.0, 1.0], [0, 1], [3, 3]), "their groups are 0 and 1"),
    ],
)
def test_wrong_columns_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(*arguments)
