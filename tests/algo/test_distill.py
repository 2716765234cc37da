"""Advantages of a student: the policy gradient they make is that of the reverse KL."""

import torch

from vime.algo.distill import taught_advantages


def test_the_teachers_part_is_taken_from_each_tokens_advantage() -> None:
    advantages, old, teacher = (torch.tensor(v) for v in ([1.0, 0.0, -1.0], [-1.0, -2.0, -0.5], [-0.5, -2.0, -1.0]))
    taught = taught_advantages(advantages, old, teacher, coef=0.1)
    torch.testing.assert_close(taught.kl, torch.tensor([-0.5, 0.0, 0.5]))
    torch.testing.assert_close(taught.advantages, torch.tensor([1.05, 0.0, -1.05]))


def test_over_all_tokens_the_policy_gradient_is_that_of_the_reverse_kl() -> None:
    """Weighted with their probability, all tokens of a vocabulary give the exact gradient of KL(student, teacher)."""
    g = torch.Generator().manual_seed(3)
    logits, teacher = torch.randn(7, generator=g, dtype=torch.float64), torch.randn(7, generator=g, dtype=torch.float64)
    logits.requires_grad_()
    student, teacher = logits.log_softmax(-1), teacher.log_softmax(-1)
    (want,) = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits, retain_graph=True)
    old = student.detach()
    taught = taught_advantages(torch.zeros_like(old), old, teacher, coef=1.0)
    (got,) = torch.autograd.grad(-(old.exp() * taught.advantages * student).sum(), logits)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close((old.exp() * taught.kl).sum(), (old.exp() * (old - teacher)).sum())
