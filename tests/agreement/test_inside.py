"""Routers' choices that rollouts carry, beside those of a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vime.agreement.inside import Insides, flips, flips_by_layer, recorded
from vime.agreement.tokens import select
from vime.types import RoutedRows, Sample

NUM_EXPERTS = 4
ROWS = np.array([[[0, 0], [0, 1]], [[0, 0], [2, 3]], [[0, 0], [1, 2]], [[0, 0], [3, 0]]], np.uint8)
"""[4 tokens, 2 layers, 2 experts], layer 0 dense; of five tokens, the last of which has none."""


def sampled(rows: np.ndarray | None = ROWS) -> Sample:
    """A prompt of 2 tokens, a response of 3."""
    sample = Sample(tokens=(5, 6), group_id=0, sample_id=0, trajectory_id=0)
    given = None if rows is None else RoutedRows(0, rows)
    sample.append_response((7, 8, 9), [-1.0, -1.0, -1.0], version=1, routed_experts=given)
    return sample


def chosen(rows: np.ndarray) -> Insides:
    """A model that chose these experts in layer 1, and experts 0 and 1 for the last token."""
    experts = np.concatenate([rows[:, 1], [[0, 1]]]).astype(np.int64)
    mask = torch.zeros(len(experts), NUM_EXPERTS, dtype=torch.bool).scatter_(1, torch.from_numpy(experts), True)
    return Insides((0,), ([],), ({1: mask},))


def test_recorded_experts_are_those_of_the_same_tokens_in_any_order() -> None:
    tokens, model = select([sampled()], 1), chosen(ROWS[:, :, ::-1])
    engine = recorded(tokens, model)
    assert engine is not None and flips_by_layer(engine, model) == {1: 0.0}
    found = flips(engine, model, tokens, np.array([0.1, 0.2, 0.3]))
    assert found is not None and found.share == 0


@pytest.mark.parametrize(("token", "response_token"), [(0, None), (1, 0), (2, 1), (3, 2)])
def test_a_flip_is_counted_with_the_token_that_its_row_predicts(token: int, response_token: int | None) -> None:
    other = ROWS.copy()
    other[token, 1] = np.setdiff1d(np.arange(NUM_EXPERTS), ROWS[token, 1])
    tokens, model = select([sampled()], 1), chosen(other)
    engine = recorded(tokens, model)
    assert engine is not None and flips_by_layer(engine, model) == {1: pytest.approx(1 / 5)}
    apart = np.array([0.1, 0.2, 0.3])
    found = flips(engine, model, tokens, apart)
    assert found is not None
    if response_token is None:  # it predicts a token of the prompt
        assert found.share == 0
    else:
        assert found.share == pytest.approx(1 / 3) and found.mean_with == apart[response_token]


def test_without_a_full_record_nothing_is_said_of_the_engines_routers() -> None:
    model = chosen(ROWS)
    assert recorded(select([sampled(None)], 1), model) is None
    short = sampled(None)
    object.__setattr__(short, "routed_experts", ROWS[:3])
    assert recorded(select([short], 1), model) is None
