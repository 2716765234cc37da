"""Weights and rejections for the difference between engine and trainer."""

import math

import pytest
import torch

from vime.algo.correction import LOG_RATIO_LIMIT, importance_weights, rejection
from vime.algo.sequences import Sequences

ROWS = torch.tensor([0, 0, 0, 1, 1])
SEQUENCES = Sequences(ROWS, torch.tensor([3.0, 2.0]))
LOG_RATIO = torch.log(torch.tensor([2.0, 0.5, 1.5, 4.0, 0.5]))


def test_a_sequence_has_the_product_of_its_ratios_or_their_geometric_mean():
    bounds = dict(mode="truncate", low=0.0, high=math.inf)
    product = importance_weights(LOG_RATIO, SEQUENCES, level="sequence", **bounds).weights
    assert product.tolist() == pytest.approx([1.5] * 3 + [2.0] * 2)
    mean = importance_weights(LOG_RATIO, SEQUENCES, level="geometric", **bounds).weights
    assert mean.tolist() == pytest.approx([1.5 ** (1 / 3)] * 3 + [2.0**0.5] * 2)


def test_bounds_are_inclusive_and_say_on_which_side_a_ratio_was_outside():
    exact = torch.log(torch.tensor([0.5, 1.0, 2.0, 0.49, 2.01], dtype=torch.float64))
    exact[[0, 2]] = torch.tensor([math.log(0.5), math.log(2.0)], dtype=torch.float64)
    for mode, outside in (("truncate", [0.5, 2.0]), ("mask", [0.0, 0.0])):
        got = importance_weights(exact, SEQUENCES, level="token", mode=mode, low=0.5, high=2.0)
        assert got.weights.tolist() == pytest.approx([0.5, 1.0, 2.0, *outside])
        assert got.below.tolist() == [False] * 3 + [True, False] and got.above.tolist() == [False] * 4 + [True]
    assert rejection(exact, SEQUENCES, level="token", low=0.5, high=2.0).kept.tolist() == [True] * 3 + [False] * 2


def test_one_token_vetoes_its_whole_sequence_at_every_level():
    log_ratio = torch.log(torch.tensor([5.0, 5.0, 1e-5, 1.0, 1.0]))
    for level in ("token", "sequence", "geometric"):
        got = rejection(log_ratio, SEQUENCES, level=level, veto=1e-4)
        assert got.kept.tolist() == [False] * 3 + [True] * 2 and (got.kept == ~got.vetoed).all()
    both = rejection(log_ratio, SEQUENCES, level="token", high=2.0, veto=1e-6)
    assert both.kept.tolist() == [False, False, True, True, True] and not both.vetoed.any()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("here", [[0, 3], [1, 2, 4], []])
def test_a_sequence_over_several_ranks_is_one_sequence(level, here):
    """The other rank's tokens come in through the sums."""
    log_ratio = torch.tensor([0.4, -3.0, 0.2, 1.0, -0.3])
    others = [i for i in range(5) if i not in here]

    def part(values):
        return Sequences(ROWS[here], SEQUENCES.counts, lambda own: own.index_add(0, ROWS[others], values[others]))

    bounds = dict(level=level, low=0.05, high=1.6)
    of_ratio = part(log_ratio)
    whole = importance_weights(log_ratio, SEQUENCES, mode="mask", **bounds).weights
    torch.testing.assert_close(
        importance_weights(log_ratio[here], of_ratio, mode="mask", **bounds).weights, whole[here]
    )
    kept = rejection(log_ratio, SEQUENCES, **bounds).kept
    assert rejection(log_ratio[here], of_ratio, **bounds).kept.tolist() == kept[here].tolist()
    vetoed = rejection(log_ratio[here], part((log_ratio.exp() < 0.1).float()), level="token", veto=0.1).vetoed
    assert vetoed.tolist() == [i in (0, 1, 2) for i in here]


def test_no_gradient_and_no_infinity():
    log_ratio = torch.tensor([500.0, -500.0, 0.0, 0.0, 0.0], requires_grad=True)
    got = importance_weights(log_ratio, SEQUENCES, level="token", mode="truncate", low=0.0, high=math.inf)
    assert not got.weights.requires_grad and torch.isfinite(got.weights).all() and (got.weights > 0).all()
    assert got.weights[0].item() == pytest.approx(math.exp(LOG_RATIO_LIMIT))


def test_senseless_settings_are_refused():
    right = dict(level="token", mode="mask", low=0.0, high=2.0)
    for change, words in (
        ({"low": 3.0}, "3.0 and 2.0"),
        ({"low": -1.0}, "-1.0"),
        ({"level": "word"}, "unknown level 'word'"),
        ({"mode": "clip"}, "unknown mode 'clip'"),
    ):
        with pytest.raises(ValueError, match=words):
            importance_weights(LOG_RATIO, SEQUENCES, **{**right, **change})
