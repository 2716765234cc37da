"""The zigzag split of sequences, and attention over it, on one process that plays every rank."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from vime.trainer.megatron.batches.context_parallel import gathered_places, local_positions, split_packed
from vime.trainer.megatron.batches.packing import Layout, pack
from vime.trainer.megatron.nn.layers import _padded, _varlen


def layout(rank=0, size=1, *, multiple=1, padded=True, device="cpu", dtype=torch.float32):
    inv_freq = torch.ones(8, device=device)
    return Layout(inv_freq=inv_freq, dtype=dtype, padded=padded, cp_rank=rank, cp_size=size, multiple=multiple)


def packed(lengths, where):
    cu = np.concatenate([[0], np.cumsum(lengths)])
    wanted = np.ones(cu[-1], dtype=np.bool_)
    wanted[cu[:-1]] = False
    tokens = np.arange(100, 100 + cu[-1], dtype=np.int32)
    return pack(tokens, cu, range(len(lengths)), wanted, layout=where, temperature=1.0)


def test_rank_r_has_the_chunks_r_from_the_front_and_from_the_back():
    assert local_positions(np.array([8, 4]), 0, 2).tolist() == [0, 1, 6, 7, 0, 3]
    assert local_positions(np.array([8, 4]), 1, 2).tolist() == [2, 3, 4, 5, 1, 2]
    assert local_positions(np.array([3, 2]), 0, 1).tolist() == [0, 1, 2, 0, 1]


def test_gathered_rows_find_their_places():
    places = gathered_places(np.array([8, 4]), np.array([10, 30]), 2)
    assert places.tolist() == [10, 11, 16, 17, 30, 33, 12, 13, 14, 15, 31, 32]


@pytest.mark.parametrize(("size", "multiple"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 4)])
def test_each_wanted_token_is_predicted_once_and_padding_is_not_wanted(size, multiple):
    lengths = [3, 1, 8, 5]
    micros = [packed(lengths, layout(rank, size, multiple=multiple)) for rank in range(size)]
    found = np.concatenate([m.wanted for m in micros])
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    assert sorted(found) == sorted(set(range(17)) - set(starts))
    for m in micros:
        assert m.packed.targets.tolist() == (m.wanted + 100).tolist()
        # The token that predicts stands right before, in its sequence and among the inputs.
        assert m.input_ids[0, m.packed.rows].tolist() == (m.wanted + 99).tolist()
        assert m.position_ids[0, m.packed.rows].tolist() == (m.wanted - 1 - starts[m.samples]).tolist()
        assert m.input_ids.shape[1] % multiple == 0
    assert len({m.input_ids.shape for m in micros}) == 1


def attend_whole(q, k, v, lengths):
    """Causal attention over each sequence alone; [T, H, D]."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    out = []
    for a, b in pairwise(np.concatenate([[0], np.cumsum(lengths)])):
        one = [x[a:b].transpose(0, 1)[None] for x in (q, k, v)]
        out.append(
            torch.nn.functional.scaled_dot_product_attention(*one, is_causal=True, scale=0.25)[0].transpose(0, 1)
        )
    return torch.cat(out)


def whole_inputs(total, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(total, h, 16, generator=g).to(dtype) for h in (4, 2, 2))


def rows_of(lengths, rank, size):
    """Where each token of a rank lies in the packed sequences."""
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    return torch.from_numpy(np.repeat(starts, lengths // size) + local_positions(lengths, rank, size))


@pytest.mark.parametrize("size", [2, 3])
def test_padded_attention_over_the_split_is_that_over_whole_sequences(size):
    lengths = np.array([1, 4, 2, 5, 2]) * 2 * size
    inputs = [x.requires_grad_() for x in whole_inputs(lengths.sum())]
    want = attend_whole(*inputs, lengths)
    rows = [rows_of(lengths, rank, size) for rank in range(size)]
    k, v = (torch.cat([x[r] for r in rows]) for x in inputs[1:])
    got = torch.zeros_like(want)
    for rank, r in enumerate(rows):
        micro = packed(lengths, layout(rank, size))
        got = got.index_copy(0, r, _padded(inputs[0][r], k, v, micro.packed, 0.25))
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    up = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    for a, b in zip(*(torch.autograd.grad((x * up).sum(), inputs) for x in (got, want)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [2, 3])
def test_each_chunk_of_queries_sees_the_keys_up_to_its_own_last(size):
    lengths = np.array([1, 4, 2]) * 2 * size
    rows = torch.cat([rows_of(lengths, rank, size) for rank in range(size)])  # of gathered keys
    for rank in range(size):
        split = split_packed(lengths, rank, size, torch.device("cpu"))
        mine = rows_of(lengths, rank, size)
        seen = rows[split.seen]
        queries, keys = list(pairwise(split.cu_seqlens_q.tolist())), list(pairwise(split.cu_seqlens_k.tolist()))
        assert len(queries) == 6 and queries[-1][1] == len(mine) and keys[-1][1] == len(seen)
        for i, ((a, b), (c, d)) in enumerate(zip(queries, keys, strict=True)):
            start = int(np.concatenate([[0], np.cumsum(lengths)])[i // 2])
            assert seen[c:d].tolist() == list(range(start, start + d - c))
            assert mine[a:b].tolist() == seen[c:d][-(b - a) :].tolist()


@pytest.mark.gpu
def test_packed_attention_over_the_split_is_that_over_whole_sequences():
    size, lengths = 2, np.array([3, 8, 5]) * 4
    inputs = [x.cuda() for x in whole_inputs(lengths.sum(), torch.bfloat16)]
    want = attend_whole(*inputs, lengths)
    rows = [rows_of(lengths, rank, size).cuda() for rank in range(size)]
    k, v = (torch.cat([x[r] for r in rows]) for x in inputs[1:])
    for rank, r in enumerate(rows):
        micro = packed(lengths, layout(rank, size, padded=False, device="cuda", dtype=torch.bfloat16))
        torch.testing.assert_close(_varlen(inputs[0][r], k, v, micro.packed, 0.25), want[r], atol=2e-2, rtol=2e-2)
