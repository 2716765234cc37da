"""Columns that the trainer takes are of one batch."""

import pickle

import numpy as np
import numpy.typing as npt
import pytest

from vime.types import RoutedExperts, TrainBatch


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
