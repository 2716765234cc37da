"""What a row gives, whatever else is computed beside it."""

import pytest
import torch
import torch.nn.functional as F

from vime.algo.fixed_linear import fixed_linear


def layer(num_inputs: int, num_outputs: int, *, num_rows: int = 150) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(num_inputs)
    sizes = ((num_rows, num_inputs), (num_outputs, num_inputs), (num_outputs,))
    return tuple(torch.randn(size, generator=generator) for size in sizes)


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(1, 3), (64, 96), (100, 33), (384, 200), (1536, 64)])
def test_rows_alone_give_the_bits_that_they_give_among_all(num_inputs: int, num_outputs: int) -> None:
    x, weight, bias = layer(num_inputs, num_outputs)
    whole = fixed_linear(x, weight, bias)
    for size in (1, 2, 3, 5, 11, 16, 17, 64, 149):
        parts = [fixed_linear(part, weight, bias) for part in x.split(size)]
        assert torch.equal(torch.cat(parts), whole), size
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert torch.equal(fixed_linear(x[:7], weight, bias), whole[:7])
    finally:
        torch.set_num_threads(threads)
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert torch.allclose(whole.double(), exact, atol=2e-4, rtol=0)
    assert torch.equal(fixed_linear(x.view(10, 15, -1), weight), fixed_linear(x, weight).view(10, 15, -1))


def test_gradients_are_those_of_a_linear_layer() -> None:
    given = [x.requires_grad_() for x in layer(130, 40, num_rows=12)]
    weights = torch.randn(3, 4, 40, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((fixed_linear(given[0].view(3, 4, -1), *given[1:]) * weights).sum(), given)
    expected = torch.autograd.grad((F.linear(given[0].view(3, 4, -1), *given[1:]) * weights).sum(), given)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_half_precision_is_torchs() -> None:
    x, weight, bias = (t.bfloat16() for t in layer(384, 50))
    assert torch.equal(fixed_linear(x, weight, bias), F.linear(x, weight, bias))
