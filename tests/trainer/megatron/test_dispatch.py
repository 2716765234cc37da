"""Tokens to experts and back, against megatron-core's own functions, bit for bit on the CPU."""

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from vime.trainer.megatron import dispatch


def routing(tokens, experts, each, device="cpu"):
    g = torch.Generator().manual_seed(0)
    chosen = torch.rand(tokens, experts, generator=g).topk(each).indices
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)
    return routing_map.to(device), torch.rand(tokens, experts, generator=g).to(device).requires_grad_()


def there_and_back(functions, x, routing_map, probs, each, up):
    rows, weights, routes = functions.permute(x, routing_map, probs=probs, num_out_tokens=len(x) * each)
    out = functions.unpermute((rows * weights[:, None]).to(x.dtype), routes, restore_shape=x.shape)
    return rows, weights, out, *torch.autograd.grad((out * up).sum(), (x, probs))


@pytest.mark.parametrize(("tokens", "experts", "each"), [(7, 4, 2), (1, 8, 8), (13, 5, 1), (40, 16, 4)])
def test_rows_sums_and_gradients_are_megatrons(tokens, experts, each):
    routing_map, probs = routing(tokens, experts, each)
    x, up = torch.randn(tokens, 6, requires_grad=True), torch.randn(tokens, 6)
    got = there_and_back(dispatch, x, routing_map, probs, each, up)
    want = there_and_back(moe_utils, x, routing_map, probs, each, up)
    for name, ours, theirs in zip(("rows", "weights", "out", "d x", "d probs"), got, want, strict=True):
        assert torch.equal(ours, theirs), name


def test_bf16_sums_are_rounded_once():
    routing_map, probs = routing(50, 16, 8)
    _, _, routes = dispatch.permute(torch.ones(50, 6), routing_map, probs, 50 * 8)
    rows = torch.randn(50 * 8, 6).bfloat16()
    out = dispatch.unpermute(rows, routes, torch.Size([50, 6]))
    want = rows.double()[routes.place].sum(1)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]])
def test_chunks_are_copied_only_where_they_move(order):
    rows, probs, sizes = torch.randn(10, 3), torch.rand(10), torch.tensor([3, 0, 5, 2])
    got = dispatch.sort_chunks_by_idxs(rows, sizes, torch.tensor(order), probs=probs)
    want = moe_utils.sort_chunks_by_idxs(rows, sizes, torch.tensor(order), probs=probs)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert (got[0] is rows) is (order == sorted(order))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_every_time_is_the_same_and_nothing_waits(dtype):
    routing_map, probs = routing(2000, 64, 8, "cuda")
    x = torch.randn(2000, 128, device="cuda", dtype=dtype, requires_grad=True)
    up = torch.randn(2000, 128, device="cuda", dtype=dtype)
    first = there_and_back(dispatch, x, routing_map, probs, 8, up)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = there_and_back(dispatch, x, routing_map, probs, 8, up)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
