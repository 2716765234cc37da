import math

import pytest
import torch

from vime.algo.kl import KL_KINDS, kl_estimate


def test_hand_values():
    d = math.log(2)  # the policy gives the token twice the reference's probability
    log_probs, ref = torch.tensor([d], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    values = {kind: kl_estimate(log_probs, ref, kind).item() for kind in KL_KINDS}
    k3 = 0.5 - 1 + d
    assert values == pytest.approx({"k1": d, "k2": d * d / 2, "k3": k3, "low_var_kl": k3, "abs": d})


def test_k1_and_k3_average_to_the_exact_kl():
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    for kind in ("k1", "k3"):
        assert (p * kl_estimate(p.log(), q.log(), kind)).sum().item() == pytest.approx(exact.item())


def test_k3_keeps_its_digits_near_zero():
    d = torch.tensor([1e-4], dtype=torch.float32)  # k3 is d^2 / 2 there: 5e-9, far below float32's step at 1
    assert kl_estimate(d, torch.zeros(1), "k3").item() == pytest.approx(5e-9, rel=0.3)


def test_only_low_var_kl_is_bounded():
    log_probs, ref = torch.tensor([-5.0]), torch.tensor([0.0])
    assert kl_estimate(log_probs, ref, "low_var_kl").item() == 10
    assert kl_estimate(log_probs, ref, "k3").item() == pytest.approx(math.exp(5) - 6)


def test_a_huge_log_ratio_stays_finite():
    log_probs = torch.tensor([-1000.0], requires_grad=True)
    kl = kl_estimate(log_probs, torch.zeros(1), "k3")
    kl.backward()
    assert torch.isfinite(kl).all() and torch.isfinite(log_probs.grad).all()


@pytest.mark.parametrize("kind", KL_KINDS)
def test_no_gradient_through_the_reference(kind):
    log_probs, ref = (torch.tensor([x], requires_grad=True) for x in (-0.5, -0.6))
    kl_estimate(log_probs, ref, kind).sum().backward()
    assert log_probs.grad is not None and ref.grad is None


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'; choose one of k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
