"""Chunked log-probs and entropy against torch's own softmax, gradients included."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.trainer.megatron.peak_memory import PeakMemory
from vime.models.memory import GIB, default_chunk_size
from vime.support import SamplingSupport
from vime.trainer.megatron.batches.support import MicroSupport
from vime.trainer.megatron.losses.log_probs import chunked_log_probs
from vime.trainer.megatron.nn.rows import take_rows


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


def test_a_frozen_weight_gets_no_gradient_though_megatron_has_a_place_for_one():
    hidden, weight, targets = inputs()
    weight.requires_grad_(False).main_grad = torch.zeros(weight.shape)
    chunked_log_probs(hidden, weight, targets, temperature=1.0, chunk_size=5, weight_is_shared=False)[
        0
    ].sum().backward()
    want = torch.autograd.grad(direct(hidden, weight, targets, 1.0)[0].sum(), hidden)[0]
    torch.testing.assert_close(hidden.grad, want, atol=1e-5, rtol=1e-5)
    assert not weight.main_grad.any()
    assert weight.grad is None


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


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_gradient_goes_into_megatrons_buffer_where_there_is_one(dtype, shared):
    hidden, weight, targets = (x.detach().to(dtype) if x.is_floating_point() else x for x in inputs())
    grads = []
    for with_buffer in (False, True):
        w, h = torch.nn.Parameter(weight.clone()), hidden.clone().requires_grad_()
        if with_buffer:
            w.main_grad = torch.ones(w.shape)
        log_probs, entropy = chunked_log_probs(
            h,
            w,
            targets.clamp(max=36),
            temperature=0.7,
            chunk_size=6,
            with_entropy_grad=True,
            num_rows=37,
            weight_is_shared=shared,
        )
        (log_probs.sum() + 0.3 * entropy.sum()).backward()
        grads.append((w.main_grad - 1 if with_buffer else w.grad, h.grad))
    assert (w.grad is None) == shared  # zeros of no memory, for hooks that want to see one
    assert shared or (w.grad.stride() == (0, 0) and not w.grad.any())
    assert grads[1][0][37:].abs().max() == 0
    torch.testing.assert_close(grads[1][1], grads[0][1], atol=0, rtol=0)
    torch.testing.assert_close(
        grads[1][0], grads[0][0].float(), atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 0.02
    )


# A whole vocabulary of one rank with GLM-4.5's hidden size; TP 8, where chunks are larger.
@pytest.mark.parametrize(("rows", "width"), [(151_936, 5120), (151_936 // 8, 4096)])
def test_the_vocabulary_takes_less_than_a_gibibyte(rows, width):
    tokens = 16_384
    with FakeTensorMode():
        hidden_states = torch.empty(tokens, width, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.nn.Parameter(torch.empty(rows, width, dtype=torch.bfloat16))
        weight.main_grad = torch.empty(rows, width)
        targets, wanted = torch.zeros(tokens, dtype=torch.long), torch.arange(tokens)
        with PeakMemory([hidden_states, weight, weight.main_grad, targets, wanted]) as memory:
            log_probs, entropy = chunked_log_probs(
                take_rows(hidden_states, wanted),
                weight,
                targets,
                temperature=0.9,
                chunk_size=default_chunk_size(rows, 2, fused=False),
                with_entropy_grad=True,
                weight_is_shared=False,
            )
            (log_probs.sum() + 0.01 * entropy.sum()).backward()
    kept = 2 * tokens * width * 2  # the wanted hidden states and the gradient of all, which autograd hands on
    assert kept < memory.peak < GIB
    assert hidden_states.grad is not None


def supports(p, v, targets, g):
    """Of p positions: a third has the whole vocabulary, the others some tokens and their own."""
    ids = []
    for k in range(p):
        some = torch.randperm(v, generator=g)[: 1 + int(torch.randint(0, v // 2, (1,), generator=g))]
        ids.append([] if k % 3 == 0 else sorted({*some.tolist(), int(targets[k])}))
    starts = np.cumsum([0, *map(len, ids)])
    return ids, SamplingSupport(np.concatenate([np.array(i, np.int32) for i in ids]), starts)


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.01])
def test_values_and_gradients_over_a_support_are_those_of_logits_that_have_no_others(chunk_size, temperature):
    hidden, weight, targets = inputs()
    ids, support = supports(23, 41, targets, torch.Generator().manual_seed(2))
    up = torch.randn(2, 23, generator=torch.Generator().manual_seed(1))
    outside = torch.ones(23, 41, dtype=torch.bool)
    for k, kept in enumerate(ids):
        outside[k, kept or slice(None)] = False

    def of_float64(hidden, weight):
        logits = (hidden.double() @ weight.double().t() / temperature).masked_fill(outside, -torch.inf)
        log_p = logits.log_softmax(-1)
        entropy = -(log_p.exp() * log_p.masked_fill(outside, 0)).sum(-1)
        return log_p.gather(1, targets[:, None])[:, 0].float(), entropy.float()

    want = of_float64(hidden, weight)
    want_grads = torch.autograd.grad((up[0] * want[0] + up[1] * want[1]).sum(), [hidden, weight])
    got = chunked_log_probs(
        hidden,
        weight,
        targets,
        temperature=temperature,
        chunk_size=chunk_size,
        with_entropy_grad=True,
        support=MicroSupport.of(support, np.arange(23), torch.device("cpu")),
    )
    got_grads = torch.autograd.grad((up[0] * got[0] + up[1] * got[1]).sum(), [hidden, weight])
    for a, b in zip((*got, *got_grads), (*want, *want_grads), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5 / temperature, rtol=1e-4)
    whole = chunked_log_probs(hidden, weight, targets, temperature=temperature, chunk_size=chunk_size)
    assert (got[0] >= whole[0] - 1e-3).all() and (got[0][1] > whole[0][1]).all()


def test_bf16_logits_outside_a_support_have_no_part_in_anything():
    hidden, weight, targets = (x.bfloat16() if x.is_floating_point() else x for x in inputs())
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    alone = SamplingSupport(targets.numpy().astype(np.int32), np.arange(24))
    got = chunked_log_probs(
        hidden,
        weight,
        targets,
        temperature=0.01,
        chunk_size=5,
        with_entropy_grad=True,
        support=MicroSupport.of(alone, np.arange(23), torch.device("cpu")),
    )
    assert not got[0].any() and not got[1].any()
    grads = torch.autograd.grad((got[0] + got[1]).sum(), [hidden, weight])
    assert not grads[0].any() and not grads[1].any()
