"""The compiled way back of RMSNorm against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from vime.trainer.megatron.nn.norms import rms_norm


def both(shape, dtype, device="cpu"):
    """(output, gradients) ours and torch's."""
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=g) * 3).to(device, dtype).requires_grad_()
    weight = (torch.randn(shape[-1:], generator=g) + 1).to(device, dtype).requires_grad_()
    up = torch.randn(shape, generator=g).to(device, dtype)
    outputs = rms_norm(x, weight, 1e-6), F.rms_norm(x, weight.shape, weight, 1e-6)
    return [(out, *torch.autograd.grad(out, (x, weight), up)) for out in outputs]


@pytest.mark.parametrize("shape", [(13, 1, 48), (1, 16), (5, 3, 24)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.04)])
def test_values_and_gradients_are_torchs(shape, dtype, bound):
    ours, torchs = both(shape, dtype)
    assert torch.equal(ours[0], torchs[0])
    for got, want in zip(ours[1:], torchs[1:], strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, atol=bound, rtol=bound)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.04)])
def test_compiled_gradients_are_torchs(dtype, bound):
    for tokens in (257, 1, 64):
        ours, torchs = both((tokens, 1, 1024), dtype, device="cuda")
        assert torch.equal(ours[0], torchs[0])
        for got, want in zip(ours[1:], torchs[1:], strict=True):
            # The weight's gradient is a sum over tokens.
            assert float((got.float() - want.float()).abs().max() / want.float().abs().max()) < bound
