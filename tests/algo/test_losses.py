"""CISPO, REINFORCE, sequence-level ratios and OPSM: gradients by finite differences, masks, cuts."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.algo.cispo import cispo_loss
from vime.algo.kl import kl_estimate
from vime.algo.opsm import on_policy_enough
from vime.algo.overlong import overlong_penalty
from vime.algo.policy_loss import clipped_loss
from vime.algo.reinforce import reinforce_loss
from vime.algo.sequences import Sequences

ROWS = torch.tensor([0, 0, 0, 1, 1, 2])
COUNTS = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)


def columns(seed=0):
    """log_probs, old, advantages: [6] float64, ratios on both sides of the bounds but not near them."""
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(6, generator=g, dtype=torch.float64) - 0.5
    moved = torch.tensor([0.5, -0.5, 0.05, -0.04, 0.6, -0.3], dtype=torch.float64)
    return old + moved, old, torch.tensor([1.0, -2.0, 0.5, 1.5, -0.7, 2.0], dtype=torch.float64)


def gradient_by_differences(function, x, h=1e-6):
    """d function(x).sum() / dx by central differences."""
    out = torch.zeros_like(x)
    for i in range(len(x)):
        step = torch.zeros_like(x)
        step[i] = h
        out[i] = (function(x + step).sum() - function(x - step).sum()) / (2 * h)
    return out


def gspo(log_probs, old, advantages, weights=1.0):
    log_ratio = Sequences(ROWS, COUNTS).mean(log_probs - old)
    return clipped_loss(log_ratio, advantages, eps_clip=0.1, eps_clip_high=0.15).loss * weights


@pytest.mark.parametrize(
    "loss",
    [
        lambda lp, old, a: clipped_loss(lp - old, a, eps_clip=0.2, eps_clip_high=0.3, eps_clip_c=1.5).loss,
        gspo,
        lambda lp, old, a: gspo(lp, old, a, torch.arange(6)),  # weights that differ inside a sequence
        lambda lp, old, a: reinforce_loss(lp, old, a).loss,
        lambda lp, old, a: kl_estimate(lp, old - a / 3, "k1", log_ratio=lp - old),
        lambda lp, old, a: kl_estimate(lp, old - a / 3, "k3", log_ratio=lp - old),
        lambda lp, old, a: kl_estimate(lp, old - a / 3, "low_var_kl", log_ratio=lp - old),
    ],
    ids=["dual clip", "gspo", "gspo weighted", "reinforce", "kl k1", "kl k3", "kl low_var_kl"],
)
def test_gradients_are_those_of_finite_differences(loss):
    log_probs, old, advantages = columns()
    log_probs.requires_grad_()
    loss(log_probs, old, advantages).sum().backward()
    want = gradient_by_differences(lambda lp: loss(lp, old, advantages), log_probs.detach())
    torch.testing.assert_close(log_probs.grad, want, atol=1e-7, rtol=1e-6)
    assert want.any()


def test_the_gradient_of_cispo_survives_clipping_and_is_not_taken_through_the_weight():
    log_probs, old, advantages = columns()
    log_probs.requires_grad_()
    out = cispo_loss(log_probs, old, advantages, eps_clip=0.2, eps_clip_high=0.3)
    out.loss.sum().backward()
    weight = (log_probs - old).exp().clamp(0.8, 1.3).detach()
    torch.testing.assert_close(log_probs.grad, -weight * advantages)
    assert out.clipped.tolist() == [True, True, False, False, True, True] and log_probs.grad.all()


def test_one_is_no_lower_bound_for_cispo():
    out = cispo_loss(torch.tensor([-9.0]), torch.tensor([-1.0]), torch.ones(1), eps_clip=1.0, eps_clip_high=4.0)
    assert not out.clipped.any() and out.ratio.item() == pytest.approx(math.exp(-8))


def test_before_the_policy_moves_all_losses_have_one_gradient():
    _, old, advantages = columns()
    for loss in (
        lambda lp: clipped_loss(lp - old, advantages, eps_clip=0.2).loss,
        lambda lp: cispo_loss(lp, old, advantages, eps_clip=0.2).loss,
        lambda lp: reinforce_loss(lp, old, advantages).loss,
    ):
        log_probs = old.clone().requires_grad_()
        loss(log_probs).sum().backward()
        torch.testing.assert_close(log_probs.grad, -advantages)


def test_the_ratio_of_a_sequence_is_a_mean_of_logs_and_not_a_sum():
    log_probs, old = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.1])
    sequences = Sequences(torch.tensor([0, 0]), torch.tensor([2.0]))
    out = clipped_loss(sequences.mean(log_probs - old), torch.ones(2), eps_clip=0.9)
    assert out.ratio.tolist() == pytest.approx([math.exp(0.3)] * 2)


@given(st.data())
def test_a_sequence_over_several_ranks_is_one_sequence(data):
    """Parts of each sequence on other ranks: their sums are added, forward and backward."""
    rows = np.array(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=9)))
    rank = np.array(data.draw(st.lists(st.integers(0, 1), min_size=len(rows), max_size=len(rows))))
    values = torch.tensor(data.draw(st.lists(st.floats(-2, 2), min_size=len(rows), max_size=len(rows))), dtype=float)
    advantages = torch.arange(len(rows), dtype=torch.float64) - 2
    counts = torch.from_numpy(np.bincount(rows, minlength=3)).double()

    def loss(of, parts):
        """The sum of the ranks' losses, in one graph: each rank adds what the others have to its own sums."""
        places = [torch.from_numpy(p) for p in parts]
        index = [torch.from_numpy(rows[p]) for p in parts]
        sums = [of.new_zeros(3).index_add(0, i, of[p]) for i, p in zip(index, places, strict=True)]
        total = of.new_zeros(())
        for r, (i, p) in enumerate(zip(index, places, strict=True)):
            others = sum((s for k, s in enumerate(sums) if k != r), of.new_zeros(3))
            mean = Sequences(i, counts, lambda own, others=others: own + others).mean(of[p])
            total = total + clipped_loss(mean, advantages[p], eps_clip=0.1).loss.sum()
        return total

    whole = values.clone().requires_grad_()
    loss(whole, [np.arange(len(rows))]).backward()
    parted = values.clone().requires_grad_()
    loss(parted, [np.flatnonzero(rank == 0), np.flatnonzero(rank == 1)]).backward()
    torch.testing.assert_close(parted.grad, whole.grad)


def test_a_rank_without_tokens_still_has_a_graph():
    empty = torch.zeros(0, requires_grad=True)
    asked = []
    sequences = Sequences(
        torch.zeros(0, dtype=torch.int64), torch.tensor([2.0]), lambda sums: asked.append(sums) or sums
    )
    sequences.mean(empty).sum().backward()
    assert asked[0].tolist() == [0] and empty.grad is not None


def test_off_policy_masking_takes_bad_sequences_alone_and_no_gradient():
    log_probs = torch.tensor([-2.0, -2.0, -2.0, -2.0], requires_grad=True)
    sampled = torch.tensor([-1.0, -1.8, -1.0, -1.8])
    sequences = Sequences(torch.tensor([0, 0, 1, 1]), torch.tensor([2.0, 2.0]))
    keep, moved = on_policy_enough(log_probs, sampled, torch.tensor([-1.0, -1.0, 1.0, 1.0]), sequences, delta=0.5)
    assert keep.tolist() == [False, False, True, True] and moved.tolist() == pytest.approx([0.6] * 4)
    assert not moved.requires_grad


def test_the_overlong_penalty_grows_over_the_buffer():
    got = overlong_penalty(np.array([10, 80, 90, 100, 200]), max_length=100, buffer_length=20, factor=0.5)
    assert got.tolist() == [0, 0, -0.25, -0.5, -0.5]


@pytest.mark.parametrize(
    ("buffer", "factor", "message"), [(0, 1, "buffer_length is 0"), (5, -1, "factor is -1"), (11, 1, "11")]
)
def test_a_senseless_penalty_is_refused(buffer, factor, message):
    with pytest.raises(ValueError, match=message):
        overlong_penalty(np.array([1]), max_length=10, buffer_length=buffer, factor=factor)
