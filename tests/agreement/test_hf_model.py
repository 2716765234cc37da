"""Scores by transformers, many sequences at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.agreement.models import write_model
from tests.agreement.scores import hf_scores, load_hf
from vime.agreement.hf_model import HfModel

SEQUENCES = [np.random.default_rng(i).integers(3, 320, length).tolist() for i, length in enumerate((2, 9, 33, 9, 21))]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_batches_of_padded_sequences_score_as_each_alone(kind: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", kind, tied=True)
    got = HfModel(folder, dtype="float32", device="cpu", max_tokens=50).log_probs(SEQUENCES, temperature=0.7)
    for one, expected in zip(got, hf_scores(load_hf(folder), SEQUENCES, 0.7), strict=True):
        assert np.isnan(one[0]) and one.dtype == np.float64
        assert np.abs(one[1:] - expected[1:]).max() < 1e-5


def test_float32_computes_with_the_weights_that_were_rounded(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3", tied=False)
    model = HfModel(folder, dtype="bfloat16", device="cpu")
    rounded = model.log_probs(SEQUENCES)
    model.compute_in("float32")
    exact = model.log_probs(SEQUENCES)
    expected = hf_scores(load_hf(folder, torch.bfloat16).float(), SEQUENCES)
    assert max(np.nanmax(np.abs(a - b)) for a, b in zip(exact, expected, strict=True)) < 1e-5
    assert max(np.nanmax(np.abs(a - b)) for a, b in zip(exact, rounded, strict=True)) > 1e-3
