"""Chunked log-probs and entropy against torch's own softmax, gradients included."""

import pytest
import torch

from vime.trainer.megatron.log_probs import chunked_log_probs


def direct(hidden, weight, targets, temperature):
    log_p = torch.log_softmax((hidden @ weight.t()).float() / temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def inputs(p=23, d=16, v=41):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(p, d, generator=g).requires_grad_()
    weight = torch.randn(v, d, generator=g).requires_grad_()
    return hidden, weight, torch.randint(0, v, (p,), generator=g)


@pytest.mark.parametrize("chunk_size", [1, 7, 23, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_match_the_direct_ones(chunk_size, temperature):
    hidden, weight, targets = inputs()
    up = torch.randn(2, 23, generator=torch.Generator().manual_seed(1))
    want = direct(hidden, weight, targets, temperature)
    want_grads = torch.autograd.grad((up[0] * want[0] + up[1] * want[1]).sum(), [hidden, weight])
    got = chunked_log_probs(
        hidden, weight, targets, temperature=temperature, chunk_size=chunk_size, with_entropy_grad=True
    )
    got_grads = torch.autograd.grad((up[0] * got[0] + up[1] * got[1]).sum(), [hidden, weight])
    for a, b in zip((*got, *got_grads), (*want, *want_grads), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[0], want[0], atol=1e-6, rtol=1e-6)


def test_a_tied_weight_gets_both_its_gradients():
    hidden, weight, targets = inputs()
    ids = torch.arange(23)

    def loss(log_probs):
        return log_probs(weight[ids] * 0.3 + hidden)[0].square().sum()

    want = torch.autograd.grad(loss(lambda h: direct(h, weight, targets, 1.0)), weight)
    got = torch.autograd.grad(
        loss(lambda h: chunked_log_probs(h, weight, targets, temperature=1.0, chunk_size=5)), weight
    )
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)


def test_the_entropy_has_no_gradient_unless_asked_for():
    hidden, weight, targets = inputs()
    log_probs, entropy = chunked_log_probs(hidden, weight, targets, temperature=1.0, chunk_size=8)
    assert log_probs.requires_grad and not entropy.requires_grad


def test_the_logits_of_all_positions_never_exist_at_once():
    hidden, weight, targets = inputs(p=4096, d=8, v=2048)
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest.append(out.numel())
            return out

    with Watch():
        chunked_log_probs(hidden, weight, targets, temperature=1.0, chunk_size=64)[0].sum().backward()
    assert max(largest) <= 64 * 2048


def test_no_positions_give_zero_gradients():
    hidden, weight, targets = inputs()
    log_probs, _ = chunked_log_probs(hidden[:0], weight, targets[:0], temperature=1.0, chunk_size=8)
    log_probs.sum().backward()
    assert weight.grad.abs().max() == 0
