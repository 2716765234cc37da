import math

import pytest
import torch

from tests.golden.softmax import token_entropy, token_log_probs


def test_hand_values_at_two_temperatures():
    logits = torch.tensor([[0.0, math.log(3)]], dtype=torch.float64)
    assert token_log_probs(logits, torch.tensor([1])).item() == pytest.approx(math.log(3 / 4))
    half = math.log(9 / 10)  # logits doubled: odds 9 to 1
    assert token_log_probs(logits, torch.tensor([1]), temperature=0.5).item() == pytest.approx(half)
    h = -(0.1 * math.log(0.1) + 0.9 * math.log(0.9))
    assert token_entropy(logits, temperature=0.5).item() == pytest.approx(h)


def test_masked_out_vocabulary_costs_no_entropy_and_no_nan_gradient():
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    entropy = token_entropy(logits)
    entropy.backward()
    assert entropy.item() == pytest.approx(math.log(2))
    assert torch.isfinite(logits.grad).all()


def test_bfloat16_logits_are_computed_in_float32():
    out = token_log_probs(torch.zeros(1, 5, dtype=torch.bfloat16), torch.tensor([0]))
    assert out.dtype == torch.float32 and out.item() == pytest.approx(-math.log(5))


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="temperature is 0"):
        token_entropy(torch.zeros(1, 2), temperature=0)
    with pytest.raises(ValueError, match=r"shape \(2, 3\) for \(1,\) tokens"):
        token_log_probs(torch.zeros(2, 3), torch.tensor([0]))
