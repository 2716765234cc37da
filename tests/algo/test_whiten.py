import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.algo.whiten import whiten


@given(st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.integers(0, 1)), max_size=20), st.data())
def test_neither_order_nor_masked_entries_count(entries, data):
    x, mask = (np.array(c, np.float64) for c in zip(*entries, strict=True)) if entries else (np.zeros(0), np.zeros(0))
    got = whiten(x, mask)
    order = data.draw(st.permutations(range(len(x))))
    spoilt = np.where(mask == 1, x, np.nan)[list(order)]
    np.testing.assert_allclose(whiten(spoilt, mask[list(order)]), got[list(order)], rtol=1e-9, atol=1e-9)
    assert not got[mask == 0].any()
    values = got[mask == 1]
    if len(values) > 1 and x[mask == 1].std(ddof=1) > 1e-2:
        assert values.mean() == pytest.approx(0, abs=1e-9)
        assert values.std(ddof=1) == pytest.approx(1, abs=1e-3)


@given(st.floats(-1e6, 1e6), st.integers(1, 9))
def test_equal_entries_give_exactly_0(value, count):
    assert not whiten(np.full(count, value), np.ones(count)).any()


def test_a_part_whitened_alone_would_differ():
    x = np.array([1.0, 2.0, 5.0, 9.0])
    whole = whiten(x, np.ones(4))
    parts = np.concatenate([whiten(x[:2], np.ones(2)), whiten(x[2:], np.ones(2))])
    assert np.abs(whole - parts).max() > 0.1
    assert whole.std(ddof=1) == pytest.approx(1)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match=r"shape \(2,\), its mask \(3,\)"):
        whiten(np.ones(2), np.ones(3))
    with pytest.raises(ValueError, match="eps is 0"):
        whiten(np.ones(2), np.ones(2), eps=0)
