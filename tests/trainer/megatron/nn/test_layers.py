"""Attention, RoPE and RMSNorm against plain ones: values, gradients, and where they round."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from vime.trainer.megatron.batches.packing import Layout, pack
from vime.trainer.megatron.nn.layers import RMSNorm, _padded, _varlen, pad_rows, take_rows
from vime.trainer.megatron.nn.rope import apply_rope


@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (4, 1)])
def test_padded_blocks_attend_like_each_sequence_alone(heads):
    lengths = [1, 9, 30, 2, 31, 8]
    cu = np.concatenate([[0], np.cumsum(lengths)])
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(cu[-1], h, 16, generator=g).requires_grad_() for h in (heads[0], heads[1], heads[1]))
    layout = Layout(inv_freq=torch.ones(8), dtype=torch.float32, padded=True)
    none = np.zeros(cu[-1], dtype=np.bool_)
    micro = pack(none.astype(np.int32), cu, range(6), none, layout=layout, temperature=1.0)
    got = _padded(q, k, v, micro.packed, 0.25)
    repeat = heads[0] // heads[1]
    parts = []
    for a, b in pairwise(cu):
        one = [
            x[a:b].transpose(0, 1)[None] for x in (q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1))
        ]
        parts.append(F.scaled_dot_product_attention(*one, is_causal=True, scale=0.25)[0].transpose(0, 1))
    want = torch.cat(parts)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    up = torch.randn(want.shape, generator=g)
    got_grads = torch.autograd.grad((got * up).sum(), (q, k, v))
    want_grads = torch.autograd.grad((want * up).sum(), (q, k, v))
    torch.testing.assert_close(got_grads, want_grads, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [(4, 2), (4, 4)])
def test_torchs_packed_kernel_takes_fewer_key_heads_in_this_torch(heads):
    # The kernel is CUDA's; whether torch refuses the call does not depend on a device.
    cu, none = np.array([0, 3, 8]), np.zeros(8, dtype=np.bool_)
    with FakeTensorMode(allow_non_fake_inputs=True):
        layout = Layout(inv_freq=torch.ones(8), dtype=torch.bfloat16, padded=False)
        micro = pack(none.astype(np.int32), cu, range(2), none, layout=layout, temperature=1.0)
        q, k, v = (torch.ones(8, h, 16, dtype=torch.bfloat16, requires_grad=True) for h in (heads[0], *heads[1:] * 2))
        out = _varlen(q, k, v, micro.packed, 0.25)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert [g.shape for g in grads] == [x.shape for x in (q, k, v)]


def test_rope_is_that_of_transformers():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 8, generator=g, dtype=torch.float64).requires_grad_()
    angles = torch.arange(5)[:, None] * torch.tensor([1.0, 0.5, 0.1, 0.01], dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    got = apply_rope(x, cos[:, None], sin[:, None])
    wide = [torch.cat((t, t), -1)[None] for t in (cos, sin)]
    want, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], *wide)
    torch.testing.assert_close(got, want[0].transpose(0, 1))
    assert torch.autograd.gradcheck(lambda t: apply_rope(t, cos[:, None], sin[:, None]), x)


def test_rope_in_half_precision_is_rounded_once():
    g = torch.Generator().manual_seed(0)
    x, cos, sin = (torch.randn(shape, generator=g).bfloat16() for shape in ((50, 3, 8), (50, 1, 4), (50, 1, 4)))
    exact = apply_rope(x.double(), cos.double(), sin.double())
    # The rotation in float32 may fall on the other side of a tie; a second rounding would differ in half the elements.
    assert (apply_rope(x, cos, sin) != exact.bfloat16()).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_on_the_cpu_round_where_transformers_rounds(make_trainer, model_folder, dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    folder, _ = model_folder(dtype=dtype)
    ours = make_trainer(folder)._policy.chunks[0].decoder.final_layernorm
    assert isinstance(ours, RMSNorm)
    x, weight = torch.randn(100, 48).to(dtype), torch.randn(48).to(dtype)
    theirs = LlamaRMSNorm(48, eps=ours.eps).to(dtype)
    with torch.no_grad():
        ours.weight.copy_(weight)
        theirs.weight.copy_(weight)
    tolerance = 0 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(ours(x), theirs(x), atol=tolerance, rtol=tolerance)


def test_rows_travel_to_their_places_and_back():
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    place = torch.tensor([5, 0, 3, 1])
    assert torch.equal(take_rows(pad_rows(x, place, 6), place), x)
    assert torch.autograd.gradcheck(lambda t: pad_rows(t, place, 6), x)
    wide = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: take_rows(t, place), wide)
