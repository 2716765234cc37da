"""The trainer's model without a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.agreement.models import write_model
from tests.agreement.scores import megatron
from vime.config import Config, TrainConfig
from vime.errors import TrainingError
from vime.platform.cpu import CpuPlatform
from vime.trainer.megatron.scoring import Scorer
from vime.types import RoutedExperts

SEQUENCES = [np.random.default_rng(i).integers(3, 320, length).tolist() for i, length in enumerate((2, 9, 33, 9))]


def test_it_says_what_the_trainer_says_and_leaves_no_process_group(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3_moe", tied=False)
    of_many_ranks = Config(
        train=TrainConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=20),
        megatron={"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "sequence_parallel": True},
    )
    with closing(Scorer(of_many_ranks, folder, CpuPlatform())) as scorer:
        scores = scorer.log_probs(SEQUENCES)
        states, routed = scorer.inside(SEQUENCES[2])
    assert [s.shape for s in states] == [(33, 64)] * 4
    assert {layer: r.sum(-1).tolist() for layer, r in routed.items()} == dict.fromkeys(range(3), [2] * 33)
    with megatron(folder, tmp_path / "rendezvous") as trainer:
        for one, expected in zip(scores, trainer.score(SEQUENCES), strict=True):
            np.testing.assert_allclose(one, expected, atol=2e-6)


def test_it_uses_the_experts_that_the_engine_used_where_they_are_known(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3_moe", tied=False)
    with closing(Scorer(Config(), folder, CpuPlatform())) as scorer:
        free = scorer.log_probs(SEQUENCES)
        own = [chosen_by(scorer.inside(sequence)[1]) for sequence in SEQUENCES]
        same = scorer.log_probs(SEQUENCES, routed_experts=joined(own))
        # Of one sequence other experts from its tenth token on, of another no rows.
        others = [own[0], own[1], np.concatenate([own[2][:9], (own[2][9:32] + 1) % 8]), own[3][:0]]
        given = joined(others)
        replayed = scorer.log_probs(SEQUENCES, routed_experts=given)
        _, routed = scorer.inside(SEQUENCES[2], RoutedExperts(others[2], np.array([len(others[2])])))
        with pytest.raises(TrainingError, match=r"\(2, 2\).*are \(3, 2\)"):
            scorer.log_probs(SEQUENCES, routed_experts=joined([rows[:, :2] for rows in own]))
        with pytest.raises(TrainingError, match="9 tokens name an expert twice"):
            scorer.log_probs(SEQUENCES, routed_experts=joined([own[0], own[1] * 0, own[2], own[3]]))
    for one, other in zip(free, same, strict=True):
        np.testing.assert_array_equal(one, other)
    for k, end in enumerate((2, 9, 10, 9)):
        np.testing.assert_allclose(free[k][:end], replayed[k][:end], atol=2e-6)
    assert (np.abs(free[2] - replayed[2])[10:] > 1e-4).mean() > 0.9
    np.testing.assert_array_equal(chosen_by(routed)[:32], np.sort(others[2]))


def chosen_by(routed: Mapping[int, Tensor]) -> np.ndarray:
    """[n, layers, 2] experts, in ascending order."""
    layers = [routed[layer].nonzero()[:, 1].reshape(-1, 2) for layer in sorted(routed)]
    return torch.stack(layers, 1).numpy().astype(np.uint8)


def joined(rows: list[np.ndarray]) -> RoutedExperts:
    return RoutedExperts(np.concatenate(rows), np.array([len(r) for r in rows]))
