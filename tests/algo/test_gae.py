import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.algo.gae import gae

STEPS = dict(gamma=0.9, lam=0.7)


def reference(rewards, values, bootstrap, gamma, lam):
    """A_t as the sum of discounted deltas, each written out; of one sample whose every token counts."""
    after = [*values, bootstrap][1:]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]


@st.composite
def batches(draw):
    """Ragged samples of up to 6 tokens: (rewards, values, mask, borders, bootstrap)."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    number = st.floats(-3, 3, width=32)
    total = sum(lengths)
    columns = (np.array(draw(st.lists(number, min_size=total, max_size=total))) for _ in range(2))
    mask = np.array(draw(st.lists(st.integers(0, 1), min_size=total, max_size=total)))
    bootstrap = np.array(draw(st.lists(number, min_size=len(lengths), max_size=len(lengths))))
    return *columns, mask, np.cumsum([0, *lengths]), bootstrap


@given(batches(), st.floats(0, 1), st.floats(0, 1))
def test_skipped_tokens_change_nothing(batch, gamma, lam):
    rewards, values, mask, borders, bootstrap = batch
    got = gae(*batch, gamma=gamma, lam=lam)
    for i in range(len(bootstrap)):
        rows = np.arange(borders[i], borders[i + 1])
        on = rows[mask[rows] == 1]
        want = reference(rewards[on].tolist(), values[on].tolist(), bootstrap[i], gamma, lam)
        np.testing.assert_allclose(got.advantages[on], want, atol=1e-12)
        np.testing.assert_allclose(got.returns[on], got.advantages[on] + values[on], atol=1e-12)
    assert not got.advantages[mask == 0].any() and not got.returns[mask == 0].any()
    spoilt = [np.where(mask == 1, c, np.nan) for c in (rewards, values)]
    again = gae(*spoilt, mask, borders, bootstrap, gamma=gamma, lam=lam)
    np.testing.assert_array_equal(again.advantages, got.advantages)
    np.testing.assert_array_equal(again.returns, got.returns)


@given(batches(), st.data())
def test_neither_order_nor_padding_nor_company_counts(batch, data):
    rewards, values, mask, borders, bootstrap = batch
    got = gae(*batch, **STEPS)
    order = data.draw(st.permutations(range(len(bootstrap))))
    padding = data.draw(st.integers(0, 3))
    rows = [np.arange(borders[i], borders[i + 1]) for i in order]
    parts = [
        [np.append(c[r], np.full(padding, x)) for r in rows] for c, x in ((rewards, 7.0), (values, 7.0), (mask, 0))
    ]
    moved = np.cumsum([0, *(len(r) + padding for r in rows)])
    again = gae(*map(np.concatenate, parts), moved, bootstrap[list(order)], **STEPS)
    for k, r in enumerate(rows):
        np.testing.assert_array_equal(again.advantages[moved[k] : moved[k] + len(r)], got.advantages[r])


def test_lam_1_and_gamma_1_are_the_sum_of_rewards_less_the_value():
    rewards, values = np.array([1.0, 2.0, 4.0]), np.array([0.5, 0.25, 0.125])
    got = gae(rewards, values, np.ones(3), np.array([0, 3]), np.array([8.0]), gamma=1, lam=1)
    np.testing.assert_allclose(got.advantages, [14.5, 13.75, 11.875])
    np.testing.assert_allclose(got.returns, [15, 14, 12])


def test_a_perfect_value_function_leaves_no_advantage():
    rewards, gamma = np.array([0.3, -1.0, 2.0, 0.5]), 0.9
    values = np.array([sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(4)])
    got = gae(rewards, values, np.ones(4), np.array([0, 4]), np.zeros(1), gamma=gamma, lam=0.5)
    np.testing.assert_allclose(got.advantages, 0, atol=1e-12)


def test_a_sample_without_steps_and_a_batch_without_tokens_give_nothing():
    got = gae(np.ones(3), np.ones(3), np.array([0, 0, 1]), np.array([0, 2, 3]), np.ones(2), **STEPS)
    assert got.advantages.tolist() == [0, 0, pytest.approx(0.9)]
    assert len(gae(*[np.zeros(0)] * 3, np.array([0]), np.zeros(0), **STEPS).advantages) == 0


def test_what_makes_no_sense_is_refused():
    good = np.ones(3), np.ones(3), np.ones(3), np.array([0, 3]), np.ones(1)
    with pytest.raises(ValueError, match="1 samples with 3 tokens"):
        gae(np.ones(2), *good[1:], **STEPS)
    with pytest.raises(ValueError, match=r"gamma is 1\.5"):
        gae(*good, gamma=1.5, lam=1)
    with pytest.raises(ValueError, match="'reset'"):
        gae(*good, **STEPS, masked="reset")
