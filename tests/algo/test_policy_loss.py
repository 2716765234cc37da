import math

import pytest
import torch

from vime.algo.policy_loss import clipped_loss


def test_inside_the_bounds_the_gradient_is_minus_advantage_times_ratio():
    log_probs = torch.tensor([-0.9, -2.1], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    advantages = torch.tensor([2.0, -3.0], dtype=torch.float64)
    out = clipped_loss(log_probs - old, advantages, eps_clip=0.2)
    out.loss.sum().backward()
    expected = [-2 * math.exp(0.1), 3 * math.exp(-0.1)]
    assert out.loss.tolist() == pytest.approx(expected)
    assert log_probs.grad.tolist() == pytest.approx(expected)
    assert not out.clipped.any() and not out.dual_clipped.any()


def test_a_clipped_token_has_no_gradient_and_the_pessimistic_side_keeps_it():
    # Ratios 1.5, 1.5, 0.5, 0.5: gains are clipped where the policy already moved with the advantage.
    log_probs = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5], dtype=torch.float64)).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    out = clipped_loss(log_probs, advantages, eps_clip=0.2, eps_clip_high=0.28)
    out.loss.sum().backward()
    assert out.loss.tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8])
    assert log_probs.grad.tolist() == pytest.approx([0, 1.5, -0.5, 0])
    assert out.clipped.tolist() == [True, False, False, True]


def test_the_dual_clip_bounds_only_negative_advantages():
    log_probs = torch.log(torch.tensor([5.0, 5.0, 2.0], dtype=torch.float64)).requires_grad_()
    advantages = torch.tensor([-1.0, 1.0, -1.0], dtype=torch.float64)
    out = clipped_loss(log_probs, advantages, eps_clip=0.2, eps_clip_c=3.0)
    out.loss.sum().backward()
    assert out.loss.tolist() == pytest.approx([3.0, -1.2, 2.0])
    assert out.dual_clipped.tolist() == [True, False, False]
    assert log_probs.grad.tolist() == pytest.approx([0, 0, 2.0])


def test_a_huge_log_ratio_stays_finite_and_a_large_one_is_untouched():
    log_probs = torch.tensor([1000.0, 60.0, -1000.0], requires_grad=True)
    out = clipped_loss(log_probs, torch.full((3,), -1.0), eps_clip=0.2)
    out.loss.sum().backward()
    assert torch.isfinite(out.loss).all() and torch.isfinite(log_probs.grad).all()
    assert out.ratio[1] == torch.tensor(60.0).exp()


def test_no_gradient_through_advantages():
    log_ratio, advantages = (torch.tensor([x], requires_grad=True) for x in (0.1, 2.0))
    clipped_loss(log_ratio, advantages, eps_clip=0.2).loss.sum().backward()
    assert log_ratio.grad is not None and advantages.grad is None


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (dict(eps_clip=-0.1), "eps_clip -0.1"),
        (dict(eps_clip=0.2, eps_clip_high=-1.0), "eps_clip_high -1.0"),
        (dict(eps_clip=0.2, eps_clip_c=1.0), "eps_clip_c is 1.0"),
    ],
)
def test_senseless_bounds_are_refused(bounds, message):
    with pytest.raises(ValueError, match=message):
        clipped_loss(torch.zeros(1), torch.zeros(1), **bounds)
