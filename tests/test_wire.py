from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.wire import aligned, checksum, duplicate_names, make_buckets


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size", [1, 3, 8, 1001])
def test_any_changed_or_moved_byte_changes_the_checksum(dtype: torch.dtype, size: int) -> None:
    tensor = torch.arange(1, size + 1).to(dtype)
    raw = tensor.view(torch.uint8)
    whole = checksum(tensor)
    assert checksum(tensor.clone()) == whole
    for place in {0, raw.numel() // 2, raw.numel() - 1}:
        changed = raw.clone()
        changed[place] ^= 1
        assert checksum(changed.view(dtype)) != whole
    if size > 1:
        assert checksum(tensor.flip(0)) != whole
        assert checksum(tensor[:-1]) != whole


def test_a_checksum_does_not_depend_on_how_a_tensor_lies_in_memory() -> None:
    tensor = torch.randn(7, 5)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)
    padded = torch.zeros(36)
    padded[1:] = tensor.reshape(-1)  # starts at an address that 8 does not divide
    assert checksum(padded[1:]) == checksum(tensor.reshape(-1))


def test_names_that_occur_twice() -> None:
    assert duplicate_names(["a", "b", "a", "c", "b", "a"]) == ["a", "b"]
