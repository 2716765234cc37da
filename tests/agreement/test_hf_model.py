"""Scores by transformers, many sequences at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.agreement.models import write_model
from tests.agreement.scores import hf_scores, load_hf
from vime.agreement.hf_model import HfModel
from vime.support import SamplingSupport

SEQUENCES = [np.random.default_rng(i).integers(3, 320, length).tolist() for i, length in enumerate((2, 9, 33, 9, 21))]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_batches_of_padded_sequences_score_as_each_alone(kind: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", kind, tied=True)
    got = HfModel(folder, dtype="float32", device="cpu", max_tokens=50).log_probs(SEQUENCES, temperature=0.7)
    for one, expected in zip(got, hf_scores(load_hf(folder), SEQUENCES, 0.7), strict=True):
        assert np.isnan(one[0]) and one.dtype == np.float64
        assert np.abs(one[1:] - expected[1:]).max() < 1e-5


def test_log_probs_over_a_support_are_normalised_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "model", "qwen3", tied=True)
    tokens = SEQUENCES[2]
    rows = [[] if k % 3 == 0 else sorted({t, 5, 6, 300}) for k, t in enumerate(tokens)]
    monkeypatch.setattr("vime.agreement.hf_model._LOGITS_BYTES", 5 * 320 * 4)  # in several parts
    model = HfModel(folder, dtype="float32", device="cpu")
    got = model.log_probs([SEQUENCES[1], tokens], temperature=0.7, supports=[None, SamplingSupport.of(rows)])
    after = model.log_probs_after(model, [tokens], [10], temperature=0.7, supports=[SamplingSupport.of(rows)])[0]
    of_all = _log_probs_of_all(folder, tokens)
    for k in range(1, len(tokens)):
        inside = rows[k] or [*range(of_all.shape[1])]
        expected = of_all[k - 1, tokens[k]] - np.log(np.exp(of_all[k - 1, inside]).sum())
        assert abs(got[1][k] - expected) < 1e-5 and (k <= 10 or abs(after[k] - expected) < 1e-5)
    np.testing.assert_allclose(got[0], model.log_probs([SEQUENCES[1]], temperature=0.7)[0], atol=1e-5)


@torch.no_grad()
def _log_probs_of_all(folder: Path, tokens: list[int]) -> np.ndarray:
    """[length, V] at temperature 0.7."""
    logits = load_hf(folder)(torch.tensor([tokens])).logits[0].double() / 0.7
    return logits.log_softmax(-1).numpy()


def test_float32_computes_with_the_weights_that_were_rounded(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3", tied=False)
    model = HfModel(folder, dtype="bfloat16", device="cpu")
    rounded = model.log_probs(SEQUENCES)
    model.compute_in("float32")
    exact = model.log_probs(SEQUENCES)
    expected = hf_scores(load_hf(folder, torch.bfloat16).float(), SEQUENCES)
    assert max(np.nanmax(np.abs(a - b)) for a, b in zip(exact, expected, strict=True)) < 1e-5
    assert max(np.nanmax(np.abs(a - b)) for a, b in zip(exact, rounded, strict=True)) > 1e-3
