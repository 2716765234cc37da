"""On-policy distillation: a student learns from a teacher's log-probs of the tokens that the student sampled."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Taught(NamedTuple):
    """[P] each."""

    advantages: Tensor
    kl: Tensor
    """log-ratio of student and teacher: its mean over sampled tokens estimates the reverse KL."""


def taught_advantages(advantages: Tensor, old: Tensor, teacher: Tensor, *, coef: float) -> Taught:
    """Advantages less the reverse KL to a teacher, token by token.

        A'_t = A_t - coef (old_t - teacher_t)

    KL(student, teacher) at a prefix is the mean of old - teacher over the student's next tokens, and by the policy
    gradient its gradient is the mean of (old - teacher) grad log p: a token that the teacher finds likelier than the
    student has a positive advantage. Each token answers for its own KL alone, as with a discount of 0.

    Args:
        advantages: [P] of rewards; zeros where the teacher is all that is learnt from.
        old: [P] log-probs of the policy that sampled; no gradient flows through them.
        teacher: [P] the teacher's log-probs of the same tokens.
    Source: MiniLLM, arXiv:2306.08543, with the KL of single steps; GKD, arXiv:2306.13649, for the student's samples.
    """
    kl = old - teacher
    return Taught(advantages - coef * kl, kl)
