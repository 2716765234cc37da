"""What a query gives, whatever else is computed beside it."""

import pytest
import torch
import torch.nn.functional as F

from vime.algo.fixed_attention import fixed_attention


def heads(length: int, *, num_heads: int = 4, groups: int = 2, width: int = 32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randn(length, n, width, generator=generator) for n in (num_heads, groups, groups))


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
def test_a_query_alone_gives_the_bits_that_it_gives_among_all(length: int) -> None:
    q, k, v = heads(length)
    whole = fixed_attention(q, k, v, 0.2)
    alone = [fixed_attention(q[i : i + 1], k[: i + 1], v[: i + 1], 0.2) for i in range(length)]
    assert torch.equal(torch.cat(alone), whole)
    assert torch.equal(fixed_attention(q[length // 2 :], k, v, 0.2), whole[length // 2 :])
    assert torch.allclose(whole, reference(q, k, v, 0.2), atol=2e-6)


def test_gradients_are_those_of_attention() -> None:
    given = [x.double().requires_grad_() for x in heads(70)]
    weights = torch.randn(70, 4, 32, dtype=torch.float64)
    found = torch.autograd.grad((fixed_attention(*given, 0.2) * weights).sum(), given)
    expected = torch.autograd.grad((reference(*given, 0.2) * weights).sum(), given)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_half_precision_is_computed_in_float32_and_rounded_once() -> None:
    q, k, v = (x.bfloat16() for x in heads(20))
    out = fixed_attention(q, k, v, 0.2)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, fixed_attention(q.float(), k.float(), v.float(), 0.2).bfloat16())
