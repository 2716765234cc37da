import pytest
import torch

from vime.algo.value_loss import value_loss

# Kinks lie where the two errors are equal and where the clip begins; finite differences stay away from both.
VALUES, OLD, RETURNS = (
    torch.tensor(x, dtype=torch.float64)
    for x in ([0.1, 0.9, -0.7, 0.35, -0.2], [0.0, 0.2, -0.1, 0.3, -0.9], [1.0, 0.4, -1.0, -0.5, 0.6])
)


@pytest.mark.parametrize("clip", [None, 0.2, 0.5])
def test_the_gradient_is_that_of_finite_differences(clip):
    values = VALUES.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, OLD, RETURNS, clip=clip).loss, [values])


@pytest.mark.parametrize("clip", [None, 0.2, 0.5])
def test_it_is_the_larger_of_two_errors(clip):
    got = value_loss(VALUES, OLD, RETURNS, clip=clip)
    for k, (v, old, r) in enumerate(zip(VALUES.tolist(), OLD.tolist(), RETURNS.tolist(), strict=True)):
        limit = float("inf") if clip is None else clip
        near = old + min(max(v - old, -limit), limit)
        assert got.loss[k].item() == pytest.approx(max((v - r) ** 2, (near - r) ** 2))
        assert bool(got.clipped[k]) == ((near - r) ** 2 > (v - r) ** 2)
        assert bool(got.moved[k]) == (abs(v - old) > limit)


def test_a_clipped_token_has_no_gradient():
    values = torch.tensor([1.0], requires_grad=True)
    got = value_loss(values, torch.tensor([0.0]), torch.tensor([1.0]), clip=0.5)
    got.loss.sum().backward()
    assert got.clipped.item() and values.grad.item() == 0


def test_a_clip_that_is_no_distance_is_refused():
    with pytest.raises(ValueError, match="value clip is 0"):
        value_loss(VALUES, OLD, RETURNS, clip=0.0)
