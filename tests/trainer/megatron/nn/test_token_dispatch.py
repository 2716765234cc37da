"""Rows to experts and back against megatron-core's permutations: order, values, gradients."""

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import permute, unpermute

from vime.trainer.megatron.nn import token_dispatch as td
from vime.trainer.megatron.nn.rows import take_rows

HIDDEN = 8
SHAPES = pytest.mark.parametrize(("tokens", "experts", "chosen"), [(13, 5, 2), (1, 4, 3), (40, 16, 8), (6, 3, 1)])


def routing(tokens, experts, chosen, device="cpu"):
    """A routing map and probabilities, zero where an expert is not chosen."""
    g = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, experts, generator=g)
    chosen = scores.topk(chosen, dim=1).indices
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)
    return routing_map.to(device), torch.where(routing_map, scores, 0.0).to(device).requires_grad_()


def there_and_back(shape, dtype, device="cpu"):
    """[(rows, probabilities, sums, gradients)] ours and Megatron's."""
    tokens, _, chosen = shape
    routing_map, probs = routing(*shape, device=device)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, HIDDEN, generator=g).to(device, dtype).requires_grad_()
    up = torch.randn(tokens, HIDDEN, generator=g).to(device, dtype)
    order = td.Order.of(routing_map, chosen)

    def ours():
        rows, p = td.copies(x, order), take_rows(probs.view(-1), order.probs)
        return rows, p, td.sums((rows.float() * p[:, None]).to(dtype), order)

    def theirs():
        rows, p, places = permute(x, routing_map, probs=probs, num_out_tokens=tokens * chosen)
        out = unpermute((rows.float() * p[:, None]).to(dtype), places, restore_shape=x.shape)
        return rows, p, out

    results = []
    for function in (ours, theirs):
        out = function()
        results.append([*out, *torch.autograd.grad((out[2] * up).sum(), (x, probs))])
    return results


@SHAPES
def test_rows_are_in_megatrons_order_and_sums_are_its_sums(tokens, experts, chosen):
    ours, theirs = there_and_back((tokens, experts, chosen), torch.float32)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    for got, want in zip(ours[2:], theirs[2:], strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@SHAPES
def test_each_row_belongs_to_the_token_it_says(tokens, experts, chosen):
    routing_map, _ = routing(tokens, experts, chosen)
    order = td.Order.of(routing_map, chosen)
    assert torch.equal(order.tokens[order.rows], torch.arange(tokens)[:, None].expand(-1, chosen))
    assert order.rows.flatten().sort().values.tolist() == list(range(tokens * chosen))
    expert = order.probs % experts
    assert (expert.diff() >= 0).all() and routing_map[order.tokens, expert].all()


def test_sums_in_half_precision_are_rounded_once():
    order = td.Order.of(routing(40, 16, 8)[0], 8)
    x = torch.randn(40 * 8, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = x[order.rows].double().sum(1)
    assert (td.sums(x, order) != want.bfloat16()).float().mean() < 0.01


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_on_cuda_rows_and_sums_are_megatrons_and_the_host_waits_for_nothing(dtype, bound):
    for shape in ((40, 16, 8), (257, 128, 8), (1, 4, 3)):
        ours, theirs = there_and_back(shape, dtype, device="cuda")
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
        for got, want in zip(ours[2:], theirs[2:], strict=True):
            torch.testing.assert_close(got, want, atol=bound, rtol=bound)
    routing_map, probs = routing(257, 128, 8, device="cuda")
    x = torch.randn(257, HIDDEN, device="cuda", dtype=dtype, requires_grad=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        order = td.Order.of(routing_map, 8)
        rows = td.copies(x, order) * take_rows(probs.view(-1), order.probs)[:, None]
        td.sums(rows.to(dtype), order).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
