import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.algo.reduce import (
    aggregation_weights,
    sequence_mean_weights,
    token_loss_weights,
    token_mean_weights,
    token_sum_weights,
)
from vime.config.estimators import LOSS_AGG_MODES

BORDERS = np.array([0, 2, 5, 6, 7])
MASK = np.array([0, 1, 1, 1, 0, 1, 0])


def test_siblings_pool_their_tokens():
    got = token_loss_weights(MASK, BORDERS, np.array([7, 5, 7, 9]), 4)
    # Trajectory 7 has tokens 1 and 5, trajectory 5 tokens 2 and 3, trajectory 9 none under mask 1.
    np.testing.assert_allclose(got, [0, 1 / 8, 1 / 8, 1 / 8, 0, 1 / 8, 0])


def test_the_divisor_stays_when_trajectories_are_missing():
    assert token_loss_weights(MASK, BORDERS, np.arange(4), 10).sum() == pytest.approx(3 / 10)


def test_token_mean_is_per_step():
    got = token_mean_weights(MASK, BORDERS, np.array([0, 0, 1, 1]))
    np.testing.assert_allclose(got, [0, 1 / 3, 1 / 3, 1 / 3, 0, 1, 0])


@given(st.data())
def test_the_loss_does_not_depend_on_order_or_cut(data):
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    ids = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths))))
    total = sum(lengths)
    mask = np.array(data.draw(st.lists(st.integers(0, 1), min_size=total, max_size=total)))
    values = np.array(data.draw(st.lists(st.floats(-5, 5), min_size=total, max_size=total)))
    borders = np.cumsum([0, *lengths])
    loss = (token_loss_weights(mask, borders, ids, 4) * values).sum()
    by_hand = 0.0
    token_ids = np.repeat(ids, lengths)
    for k in set(ids.tolist()):
        chosen = (token_ids == k) & (mask == 1)
        by_hand += values[chosen].mean() / 4 if chosen.any() else 0.0
    assert loss == pytest.approx(by_hand, abs=1e-12)
    order = data.draw(st.permutations(range(len(lengths))))
    tokens = np.concatenate([np.arange(borders[i], borders[i + 1]) for i in order])
    moved = np.cumsum([0, *(lengths[i] for i in order)])
    again = (token_loss_weights(mask[tokens], moved, ids[list(order)], 4) * values[tokens]).sum()
    assert again == pytest.approx(loss, abs=1e-12)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="4 samples with 7 tokens"):
        token_loss_weights(MASK[:3], BORDERS, np.arange(4), 4)
    with pytest.raises(ValueError, match="n_global is 0"):
        token_loss_weights(MASK, BORDERS, np.arange(4), 0)
    with pytest.raises(ValueError, match="length 0"):
        token_sum_weights(MASK, BORDERS, n_global=4, length=0)
    with pytest.raises(ValueError, match="unknown aggregation 'mean'"):
        aggregation_weights("mean", MASK, BORDERS, **_COLUMNS)


_COLUMNS = dict(trajectory_ids=np.array([7, 5, 7, 9]), step_ids=np.array([0, 0, 0, 1]), n_global=2, length=10)


def test_a_sequence_mean_counts_siblings_one_by_one_and_empty_samples_in_their_step():
    got = sequence_mean_weights(MASK, BORDERS, np.array([0, 0, 1, 1]))
    np.testing.assert_allclose(got, [0, 1 / 2, 1 / 4, 1 / 4, 0, 1 / 2, 0])
    without = sequence_mean_weights(MASK, BORDERS, np.array([0, 0, 1, 1]), count_empty=False)
    np.testing.assert_allclose(without, [0, 1 / 2, 1 / 4, 1 / 4, 0, 1, 0])


def test_a_sum_divides_by_constants():
    np.testing.assert_allclose(token_sum_weights(MASK, BORDERS, n_global=4, length=5), MASK / 20)


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("trajectory-mean", [0, 1 / 4, 1 / 4, 1 / 4, 0, 1 / 4, 0]),
        ("token-mean", [0, 1 / 4, 1 / 4, 1 / 4, 0, 1 / 4, 0]),
        ("seq-mean-token-mean", [0, 1 / 3, 1 / 6, 1 / 6, 0, 1 / 3, 0]),
        ("seq-mean-token-sum", [0, 1 / 2, 1 / 2, 1 / 2, 0, 1 / 2, 0]),
        ("seq-mean-token-sum-norm", [0, 1 / 20, 1 / 20, 1 / 20, 0, 1 / 20, 0]),
    ],
)
def test_each_aggregation_by_its_name(mode, weights):
    np.testing.assert_allclose(aggregation_weights(mode, MASK, BORDERS, **_COLUMNS), weights)
    assert mode in LOSS_AGG_MODES
