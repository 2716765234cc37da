"""The trainer's model without a trainer."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

from tests.agreement.models import write_model
from tests.agreement.scores import megatron
from vime.config import Config, TrainConfig
from vime.platform.cpu import CpuPlatform
from vime.trainer.megatron.scoring import Scorer

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
