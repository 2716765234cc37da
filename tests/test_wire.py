from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.wire import _FACTORS as FACTORS
from vime.wire import _GOLDEN as GOLDEN
from vime.wire import aligned, checksum, checksums, duplicate_names, make_buckets


@given(sizes=st.lists(st.integers(0, 400), max_size=30), max_bytes=st.integers(1, 1000))
def test_every_tensor_once_in_order_and_no_bucket_too_large(sizes: list[int], max_bytes: int) -> None:
    stream = [(str(i), torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    buckets = [[(name, tensor.numel()) for name, tensor in bucket] for bucket in make_buckets(stream, max_bytes)]
    assert [item for bucket in buckets for item in bucket] == [(n, t.numel()) for n, t in stream]
    for bucket in buckets:
        assert bucket
        assert len(bucket) == 1 or sum(aligned(size) for _, size in bucket) <= max_bytes


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


@given(data=st.binary(min_size=1, max_size=300), place=st.integers(0, 299), bit=st.integers(0, 7))
def test_one_flipped_bit_always_shows(data: bytes, place: int, bit: int) -> None:
    tensor = torch.tensor(list(data), dtype=torch.uint8)
    changed = tensor.clone()
    changed[place % len(data)] ^= 1 << bit
    assert checksum(changed) != checksum(tensor)


@given(values=st.lists(st.integers(-(1 << 15), (1 << 15) - 1), min_size=2, max_size=150), seed=st.integers(0, 1 << 30))
def test_elements_in_another_order_show(values: list[int], seed: int) -> None:
    """Two that changed places, all in reverse, and all shuffled; 16-bit elements, so that words share some."""
    tensor = torch.tensor(values, dtype=torch.int16)
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randint(len(values), (2,), generator=generator).tolist()
    swapped = tensor.clone()
    swapped[[first, second]] = tensor[[second, first]]
    for other in (swapped, tensor.flip(0), tensor[torch.randperm(len(values), generator=generator)]):
        assert (checksum(other) == checksum(tensor)) == bool(torch.equal(other, tensor))


@pytest.mark.parametrize("distance", [1, 15, 16, 17, 160])
def test_words_that_differ_in_their_highest_bit_alone_show_when_they_change_places(distance: int) -> None:
    """Their difference is the power of two that a sum of products modulo 2^64 loses first."""
    words = torch.zeros(400, dtype=torch.int32)
    words[100] = -(1 << 31)
    moved = words.roll(distance)
    assert checksum(moved) != checksum(words)
    symmetric = words.clone()
    symmetric[[103, 102]] = words[[100, 101]]  # an arithmetic progression of factors would not see this one
    symmetric[[100, 101]] = words[[103, 102]]
    assert checksum(symmetric) != checksum(words)


@given(sizes=st.lists(st.integers(0, 200), min_size=1, max_size=12), wrong=st.integers(0, 11))
def test_a_buckets_checksums_are_those_of_its_tensors_wherever_they_lie(sizes: list[int], wrong: int) -> None:
    tensors = [torch.arange(size, dtype=torch.int16) * (i + 3) for i, size in enumerate(sizes)]
    data = torch.zeros(sum(aligned(t.nbytes) for t in tensors), dtype=torch.uint8)
    offset = 0
    for tensor in tensors:
        data[offset : offset + tensor.nbytes] = tensor.view(torch.uint8)
        offset += aligned(tensor.nbytes)
    sums = checksums(data, [tensor.nbytes for tensor in tensors])
    assert sums == [checksum(tensor) for tensor in tensors]
    victim = wrong % len(sizes)
    if sizes[victim]:
        data[sum(aligned(t.nbytes) for t in tensors[:victim])] ^= 1
        again = checksums(data, [tensor.nbytes for tensor in tensors])
        assert [i for i in range(len(sizes)) if again[i] != sums[i]] == [victim]


def test_a_checksum_is_this_number_on_every_device() -> None:
    """Both ends may run on other devices, torch releases and machines: the definition may not move by itself.

    By hand, with Python's whole numbers, from the definition in the docstring.
    """
    tensor = torch.arange(100, dtype=torch.int32) * 40_503_111 - 7
    assert checksum(tensor) == by_hand(tensor.tolist())
    if torch.cuda.is_available():
        assert checksum(tensor.cuda()) == by_hand(tensor.tolist())


def by_hand(words: list[int]) -> int:
    modulus = 1 << 64
    padded = words + [0] * (-len(words) % 16)
    total = 4 * len(words)
    for row in range(len(padded) // 16):
        digest = sum(word * factor for word, factor in zip(padded[16 * row : 16 * row + 16], FACTORS, strict=True))
        mixed = (digest ^ ((row + 1) * GOLDEN)) % modulus
        mixed = (mixed ^ (mixed >> 32)) * GOLDEN % modulus
        total += mixed ^ (mixed >> 29)
    return total % modulus


def test_names_that_occur_twice() -> None:
    assert duplicate_names(["a", "b", "a", "c", "b", "a"]) == ["a", "b"]
