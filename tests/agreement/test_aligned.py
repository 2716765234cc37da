"""--aligned on a CPU in float32: trainer and engine give a dense model's log-probs to the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.agreement.models import write_model
from vime.agreement.engine import engine_starter
from vime.config import Config, RolloutConfig, TrainConfig
from vime.platform.cpu import CpuPlatform
from vime.protocols import SamplingParams
from vime.trainer.megatron.scoring import Scorer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS = [[5, 9, 11], list(range(20, 40)), [int(i) for i in np.random.default_rng(0).integers(3, 320, 150)]]


@pytest.mark.parametrize(("kind", "width"), [("qwen3", 1536), ("llama", 1536), ("qwen2", 1536)])
def test_log_probs_of_trainer_and_engine_are_the_same_numbers(
    tiny_qwen3: Path, tmp_path: Path, kind: str, width: int
) -> None:
    folder = write_model(tmp_path / "model", kind, tied=kind == "llama", width=width)
    for file in tiny_qwen3.glob("tokenizer*"):
        shutil.copy(file, folder)
    apart = {}
    rollout = RolloutConfig(rollout_max_context_len=256)
    config = Config(train=TrainConfig(aligned=True), rollout=rollout)
    with engine_starter(config, CpuPlatform())(folder) as engine:
        samples = engine.sample(PROMPTS, SamplingParams(n=4, max_tokens=40, seed=0, ignore_eos=True))
    for aligned in (True, False):
        scorer = Scorer(Config(train=TrainConfig(aligned=aligned)), folder, CpuPlatform())
        scores = scorer.log_probs([sample.tokens for sample in samples])
        scorer.close()
        mine = np.concatenate([s[-sample.response_length :] for s, sample in zip(scores, samples, strict=True)])
        theirs = np.concatenate([np.array(sample.rollout_log_probs, np.float32) for sample in samples])
        assert len(mine) == 12 * 40
        apart[aligned] = np.abs(mine - theirs)
    print({name: (float(a.mean()), float(a.max())) for name, a in apart.items()})
    assert apart[True].max() == 0 < apart[False].max() < 1e-5
