"""Columns that the trainer takes are of one batch; rows of experts are of their sample's tokens."""

import copy
import pickle

import numpy as np
import numpy.typing as npt
import pytest

from vime.types import RoutedExperts, RoutedRows, Sample, SamplingSupport, TrainBatch


def routed(known: list[int], rows: int | None = None, dtype: npt.DTypeLike = np.uint8) -> RoutedExperts:
    return RoutedExperts(np.ones((sum(known) if rows is None else rows, 3, 2), dtype), np.array(known))


def batch(lengths: list[int], routed_experts: RoutedExperts | None) -> TrainBatch:
    b, t = len(lengths), sum(lengths)
    return TrainBatch(
        rollout_id=0,
        tokens=np.zeros(t, np.int32),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
        loss_mask=np.zeros(t, np.uint8),
        rollout_log_probs=np.full(t, np.nan, np.float32),
        loss_weights=np.zeros(t, np.float32),
        advantages=np.zeros(b, np.float32),
        rewards=np.zeros(b, np.float32),
        group_ids=np.zeros(b, np.int64),
        trajectory_ids=np.arange(b),
        steps=(((tuple(range(b)),),),),
        global_batch_size=b,
        truncated=np.zeros(b, np.bool_),
        routed_experts=routed_experts,
    )


def test_routed_experts_know_where_each_samples_rows_begin() -> None:
    assert routed([3, 0, 2], dtype=np.uint16).starts.tolist() == [0, 3, 3, 5]
    assert batch([4, 2, 2], routed([3, 0, 2])).routed_experts is not None


def test_routed_experts_that_are_not_of_these_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="counts 5 tokens, but there are 4 rows"):
        routed([3, 2], rows=4)
    with pytest.raises(ValueError, match="dtype int64, expected"):
        routed([3], dtype=np.int64)
    with pytest.raises(ValueError, match="sample 1 has 2 tokens, but routed experts of 3"):
        batch([4, 2], routed([3, 3]))
    with pytest.raises(ValueError, match="is of 3 samples, expected 2"):
        batch([4, 2], routed([1, 1, 0]))


def test_routed_experts_are_pickled_out_of_band_so_that_processes_of_a_node_share_them() -> None:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch([40_000], routed([39_999])), protocol=5, buffer_callback=buffers.append)
    assert len(data) < 2_000
    assert 39_999 * 3 * 2 in [len(b.raw()) for b in buffers]


def rows(start: int, stop: int, mark: int = 0, dtype: npt.DTypeLike = np.uint8) -> RoutedRows:
    """[[token, mark]] of tokens start to stop - 1."""
    return RoutedRows(start, np.array([[[t, mark]] for t in range(start, stop)], dtype).reshape(-1, 1, 2))


def sampled() -> Sample:
    """Three prompt tokens and two sampled ones, with rows of all but the last."""
    sample = Sample(tokens=(1, 2, 3))
    sample.append_response([4, 5], [-1.0, -1.0], routed_experts=rows(0, 4, mark=1))
    return sample


@pytest.mark.parametrize("start", [0, 2, 4])
def test_rows_join_behind_those_that_are_known(start: int) -> None:
    sample = sampled()
    sample.append_response([6], trainable=False)  # a tool's; its row comes with the next request
    assert sample.num_routed == 4
    sample.append_response([7, 8], [-1.0, -1.0], routed_experts=rows(start, 7, mark=2))
    assert sample.routed_experts is not None
    assert sample.routed_experts[:, 0].tolist() == [[0, 1], [1, 1], [2, 1], [3, 1], [4, 2], [5, 2], [6, 2]]
    assert not sample.routed_experts.flags.writeable


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (rows(0, 4), "end at token 3, but the sample will have 6 tokens"),
        (rows(0, 6), "end at token 5, but .* with rows up to token 4"),
        (rows(5, 5), "begin at token 5, but they are known of the first 4 only"),
        (rows(4, 5, dtype=np.uint16), r"uint16 \(1, 2\) cannot follow uint8 \(1, 2\)"),
        (rows(4, 5, dtype=np.int64), "cannot follow"),
    ],
)
def test_rows_of_other_tokens_are_refused_and_the_sample_stays_as_it_was(new: RoutedRows, message: str) -> None:
    sample = sampled()
    with pytest.raises(ValueError, match=message):
        sample.append_response([6], [-1.0], routed_experts=new)
    assert sample.tokens == (1, 2, 3, 4, 5) and sample.num_routed == 4


def test_a_sample_takes_no_rows_but_small_whole_numbers() -> None:
    with pytest.raises(ValueError, match="dtype int64, expected"):
        Sample(tokens=(1, 2, 3)).append_response([4], [-1.0], routed_experts=rows(0, 3, dtype=np.int64))
    with pytest.raises(ValueError, match="2 rows for 2 tokens"):
        Sample(tokens=(1, 2), routed_experts=np.zeros((2, 1, 2), np.uint8))


def test_samples_with_rows_can_be_compared() -> None:
    assert sampled() == sampled() and sampled() in [Sample(tokens=(1,)), sampled()]


def test_supports_join_turn_by_turn_and_tokens_of_a_tool_have_none() -> None:
    sample = Sample(tokens=(1, 2, 3))
    sample.append_response([4, 5], [-1.0, -1.0], support=SamplingSupport.of([[4, 9], [5]]))
    sample.append_response([6], trainable=False)
    sample.append_response([7], [-1.0], support=SamplingSupport.of([[8, 7]]))
    assert sample.support is not None and sample.support.rows() == [[4, 9], [5], [], [8, 7]]
    for tokens, of in (([7], [[8]]), ([7, 8], [[7]])):
        with pytest.raises(ValueError, match=r"not among those that could have|support of 1 tokens came with 2"):
            sample.append_response(tokens, [-1.0] * len(tokens), support=SamplingSupport.of(of))
    assert len(sample.tokens) == 7
    before = Sample(tokens=(1,))
    before.append_response([2], [-1.0])  # from the whole vocabulary
    before.append_response([3], [-1.0], support=SamplingSupport.of([[3]]))
    assert before.support is not None and before.support.rows() == [[], [3]]


def test_a_copy_has_every_field_and_shares_what_cannot_change() -> None:
    prompt = (1, 2, 3)
    first, second = (Sample(prompt="p", tokens=prompt, metadata={"a": 1}) for _ in range(2))
    assert first.tokens is second.tokens is prompt
    assert Sample(prompt="p", tokens=(True, np.int64(2))).tokens == (1, 2)
    assert all(type(token) is int for token in Sample(prompt="p", tokens=(True, np.int64(2))).tokens)
    first.append_response((4, 5), (-0.5, -0.25), version=3)
    copied = copy.copy(first)
    assert copied == first and copied is not first and copied.tokens is first.tokens
    copied.append_response((6,), (-1.0,), version=4)
    copied.reward = 1.0
    assert first.tokens == (1, 2, 3, 4, 5) and first.reward is None
    with pytest.raises(AttributeError, match="aligned"):
        copied.tokens = ()
