from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.weight_sync.buckets import make_buckets
from vime.wire import aligned


@given(sizes=st.lists(st.integers(0, 400), max_size=30), max_bytes=st.integers(1, 1000))
def test_every_tensor_once_in_order_and_no_bucket_too_large(sizes: list[int], max_bytes: int) -> None:
    stream = [(str(i), torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    buckets = [[(name, tensor.numel()) for name, tensor in bucket] for bucket in make_buckets(stream, max_bytes)]
    assert [item for bucket in buckets for item in bucket] == [(n, t.numel()) for n, t in stream]
    for bucket in buckets:
        assert bucket
        assert len(bucket) == 1 or sum(aligned(size) for _, size in bucket) <= max_bytes


def test_a_buckets_tensors_can_be_freed_when_the_next_is_asked_for() -> None:
    buckets = make_buckets((("x", torch.zeros(100)) for _ in range(3)), 100)
    first = next(buckets)
    next(buckets)
    assert [len(first)] == [1]  # the list is reused: it holds the second bucket now


def test_a_bucket_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        next(make_buckets([("x", torch.zeros(1))], 0))
