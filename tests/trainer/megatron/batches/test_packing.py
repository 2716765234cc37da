"""The layout of micro-batches."""

import numpy as np
import pytest
import torch

from vime.trainer.megatron.batches.packing import Layout, pack

LAYOUT = Layout(inv_freq=torch.tensor([1.0, 0.1]), dtype=torch.float32, padded=True)


def packed(lengths, samples=None, wanted=None):
    cu = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.arange(cu[-1], dtype=np.int32)
    if wanted is None:
        wanted = np.ones(cu[-1], dtype=np.bool_)
        wanted[cu[:-1]] = False
    samples = range(len(lengths)) if samples is None else samples
    return pack(tokens, cu, tuple(samples), wanted, layout=LAYOUT, temperature=1.0)


def test_wanted_tokens_are_predicted_by_the_position_before_them():
    micro = packed([3, 1, 4], samples=[2, 0])
    assert micro.input_ids.tolist() == [[4, 5, 6, 7, 0, 1, 2]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert micro.packed.rows.tolist() == [0, 1, 2, 4, 5]
    assert micro.packed.targets.tolist() == [5, 6, 7, 1, 2]
    assert micro.wanted.tolist() == [5, 6, 7, 1, 2]
    assert micro.samples.tolist() == [2, 2, 2, 0, 0]
    assert micro.packed.cu_seqlens_q.tolist() == [0, 4, 7]


def test_every_token_has_a_place_of_its_own_inside_its_block():
    lengths = np.random.default_rng(0).integers(1, 60, 200)
    micro = packed(lengths)
    place = micro.packed.place.tolist()
    assert len(set(place)) == len(place) == lengths.sum()
    cu = np.concatenate([[0], np.cumsum(lengths)])
    for i, n in enumerate(lengths):
        start = place[cu[i]]
        assert place[cu[i] : cu[i + 1]] == list(range(start, start + n))
        block = next(b for b in micro.packed.blocks if b.start <= start < b.start + b.rows * b.length)
        assert (start - block.start) % block.length == 0 and n <= block.length


def test_padding_stays_below_its_bound():
    lengths = np.random.default_rng(1).integers(1, 500, 300)
    micro = packed(lengths)
    assert micro.packed.padded_rows <= lengths.sum() / (1 - 0.25) + 1
    assert len(micro.packed.blocks) < 20


def test_a_first_token_cannot_be_wanted():
    with pytest.raises(ValueError, match="first token"):
        packed([2, 2], wanted=np.array([True, True, False, True]))


def test_a_rank_without_samples_gets_a_token_of_which_nothing_is_wanted():
    micro = packed([3, 2], samples=[])
    assert micro.input_ids.shape == (1, 1) and len(micro.wanted) == 0 and micro.packed.rows.numel() == 0
