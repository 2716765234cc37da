from dataclasses import replace

import numpy as np
import pytest

from tests.trainer.conftest import make_batch_of
from vime.support import SamplingSupport


def support(*ids):
    """Of tokens with these ids."""
    return SamplingSupport(np.array([i for of in ids for i in of], np.int32), np.cumsum([0, *map(len, ids)]))


def test_a_token_lacks_from_its_support_only_where_it_has_one():
    of = support([3, 5], [], [7], [5, 3, 7])
    assert of.counts.tolist() == [2, 0, 1, 3]
    assert of.lacks(np.array([5, 9, 6, 7])).tolist() == [False, False, True, False]
    assert support([], []).lacks(np.array([1, 2])).tolist() == [False, False]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"shape \(2,\) and int64, expected \[N\] int32"):
        SamplingSupport(np.array([1, 2]), np.array([0, 2]))
    for starts in ([0, 1], [1, 2], [0, 3, 2], [[0, 2]], []):
        with pytest.raises(ValueError, match="must rise from 0 to the 2 ids"):
            SamplingSupport(np.array([1, 2], np.int32), np.array(starts, np.int64))


def test_a_batch_knows_that_trained_tokens_could_have_been_sampled():
    batch = make_batch_of([5, 4])
    right = [[int(token)] for token in batch.tokens]
    right[0] = [int(batch.tokens[0]) + 1]  # a prompt's token: nobody sampled it
    assert replace(batch, support=support(*right)).support is not None
    with pytest.raises(ValueError, match=r"token 8 \(id \d+\) is not among those that could have been sampled"):
        replace(batch, support=support(*right[:8], [int(batch.tokens[8]) + 1]))
    with pytest.raises(ValueError, match="support is of 8 tokens, expected 9"):
        replace(batch, support=support(*right[:8]))


def test_supports_of_tokens_one_after_the_other_join():
    of = SamplingSupport.of([[3, 5], [], [7]])
    assert of.rows() == [[3, 5], [], [7]] and of.ids.dtype == np.int32 and of.starts.dtype == np.int64
    joined = SamplingSupport.joined([(2, None), (3, of), (0, SamplingSupport.of([])), (1, SamplingSupport.of([[9]]))])
    assert joined is not None and joined.rows() == [[], [], [3, 5], [], [7], [9]]
    assert SamplingSupport.joined([(2, None), (1, None)]) is None
    assert of.first(1).rows() == [[3, 5]] and of.first(0).rows() == []
    with pytest.raises(ValueError, match="a support of 3 tokens came with 2"):
        SamplingSupport.joined([(2, of)])
