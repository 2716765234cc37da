"""One function for norms, RoPE and the cut into heads against each of them alone: values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from vime.trainer.megatron.nn import heads
from vime.trainer.megatron.nn.rope import apply_rope

TOKENS, GROUPS, WIDTH, EPS = 13, 2, 16, 1e-6
ON_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def inputs(ratio, rotated, dtype, *, norms, device="cpu", tokens=TOKENS):
    g = torch.Generator().manual_seed(tokens)

    def random(*shape):
        return torch.randn(shape, generator=g).to(device, dtype)

    mixed = random(tokens, GROUPS, ratio + 2, WIDTH).requires_grad_()
    weights = [(random(WIDTH) + 1).requires_grad_() if norms else None for _ in range(2)]
    angles = torch.rand(tokens, 1, rotated // 2, generator=g) * 6
    ups = [random(tokens, count, WIDTH) for count in (GROUPS * ratio, GROUPS, GROUPS)]
    return mixed, weights, angles.cos().to(device, dtype), angles.sin().to(device, dtype), ups


def one_after_the_other(mixed, weights, cos, sin, eps):
    query, key, value = heads.split(mixed)
    query, key = (
        apply_rope(x if w is None else F.rms_norm(x, (WIDTH,), w, eps), cos, sin)
        for x, w in zip((query, key), weights, strict=True)
    )
    return query, key, value


def both(ratio, rotated, dtype, **kwargs):
    """(values and gradients of the one function, of one operation after the other)."""
    mixed, weights, cos, sin, ups = inputs(ratio, rotated, dtype, **kwargs)
    wrt = [mixed, *(w for w in weights if w is not None)]
    results = []
    for out in (heads.fused_heads(mixed, *weights, cos, sin, EPS), one_after_the_other(mixed, weights, cos, sin, EPS)):
        loss = sum((o * up).float().sum() for o, up in zip(out, ups, strict=True))
        results.append([*out, *torch.autograd.grad(loss, wrt)])
    return results


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("rotated", [WIDTH, WIDTH // 2])
@pytest.mark.parametrize("norms", [True, False], ids=["norms", "plain"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.04)])
def test_heads_are_those_of_one_operation_after_the_other(ratio, rotated, norms, dtype, bound):
    for got, want in zip(*both(ratio, rotated, dtype, norms=norms), strict=True):
        assert got.dtype == dtype and got.shape == want.shape
        torch.testing.assert_close(got, want, atol=bound, rtol=bound)


def test_values_are_rounded_where_the_engines_kernels_round():
    mixed, weights, cos, sin, _ = inputs(2, WIDTH, torch.bfloat16, norms=True)
    query, key, value = heads.split(mixed.float())
    for got, x, weight in zip(heads.fused_heads(mixed, *weights, cos, sin, EPS), (query, key), weights, strict=False):
        norm = F.rms_norm(x, (WIDTH,), weight.float(), EPS).bfloat16()  # once after the norm
        assert (got != apply_rope(norm, cos, sin)).float().mean() < 0.01  # once after the rotation
    assert torch.equal(heads.fused_heads(mixed, *weights, cos, sin, EPS)[2].float(), value)


@pytest.mark.gpu
@ON_CUDA
@pytest.mark.parametrize("rotated", [WIDTH, WIDTH // 2])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.06)])
def test_compiled_heads_are_those_of_one_operation_after_the_other(rotated, dtype, bound):
    for tokens in (257, 1, 64):
        results = both(2, rotated, dtype, norms=True, device="cuda", tokens=tokens)
        for got, want in zip(*results, strict=True):
            # The weights' gradients are sums over tokens.
            scale = want.float().abs().max().clamp(min=1)
            assert float((got.float() - want.float()).abs().max() / scale) < bound
