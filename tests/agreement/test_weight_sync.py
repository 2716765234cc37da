"""Weights of the real trainer into a real engine; where embedding and output head are one, both must be the new ones.

vLLM's Qwen3 shares one parameter for the two; its Llama keeps a head of its own that is only tied to the embedding.
Mixtures of experts, untied as published, are in tests/e2e/test_mixtures.py too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.agreement.models import train_batch, write_model
from tests.agreement.scores import Sampled, hf_scores, largest, load_hf, megatron
from vime.config import AlgoConfig
from vime.engine.vllm.control import VllmEngine
from vime.engine.vllm.server import EngineServer
from vime.weight_sync import shm
from vime.weight_sync.plan import WeightSync
from vime.weight_sync.verify import ProbeTolerance

pytestmark = pytest.mark.engine

PROMPTS = [[10, 20, 30, 40], list(range(50, 90))]


@dataclass(frozen=True)
class Case:
    """An engine, the checkpoint it was started from, and another of the same shape."""

    control: VllmEngine
    served: Path
    other: Path
    is_tied: bool


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("llama", True), id="llama-tied"),
        pytest.param(("qwen3", True), id="qwen3-tied"),
        pytest.param(("qwen3_moe", True), id="qwen3_moe-tied", marks=pytest.mark.slow),
        pytest.param(("glm4_moe", False), id="glm4_moe", marks=pytest.mark.slow),
    ],
)
def case(
    request: pytest.FixtureRequest,
    start_engine: Callable[..., EngineServer],
    tiny_qwen3: Path,
    tmp_path_factory: pytest.TempPathFactory,
    run_key: str,
) -> Iterator[Case]:
    kind, is_tied = request.param
    root = tmp_path_factory.mktemp(kind)
    served, other = (write_model(root / f"seed-{seed}", kind, tied=is_tied, seed=seed) for seed in (1, 2))
    for file in tiny_qwen3.glob("tokenizer*"):
        shutil.copy(file, served)
    server = start_engine(served)
    control = VllmEngine(server.url, run_key)
    yield Case(control, served, other, is_tied)
    control.close()
    server.stop()


def greedy(control: VllmEngine) -> Sampled:
    """What the engine generates greedily now, and its log-probs at temperature 1."""
    probe = control.probe(PROMPTS, 32)
    return Sampled(
        prompts=probe.prompts,
        responses=tuple(c.token_ids for c in probe.completions),
        log_probs=np.array([x for c in probe.completions for x in c.log_probs]),
    )


def distance(sampled: Sampled, checkpoint: Path) -> float:
    """Largest difference between the engine's log-probs and HF's of a checkpoint."""
    return largest(sampled.log_probs, sampled.of_responses(hf_scores(load_hf(checkpoint), sampled.sequences)))


def test_all_weights_are_the_trainers_after_each_sync(case: Case, tmp_path: Path) -> None:
    before = greedy(case.control)
    assert distance(before, case.served) < 1e-5
    assert distance(before, case.other) > 0.5
    writer = shm.Writer()
    with megatron(case.other, tmp_path / "rendezvous", writer=writer) as trainer:
        assert ("lm_head.weight" in trainer.weight_names()) is not case.is_tied
        sync = WeightSync(
            trainer,
            [case.control],
            transport="shm",
            probe_prompts=PROMPTS,
            probe_interval=1,
            probe_tolerance=ProbeTolerance(1e-5),
        )
        sync.publish()
        synced = greedy(case.control)
        assert distance(synced, case.other) < 1e-5
        trainer.train(train_batch(synced.samples(), AlgoConfig(disable_rewards_normalization=True), max_tokens=200))
        trainer.export_hf(tmp_path / "trained")
        assert distance(synced, tmp_path / "trained") > 1e-2  # the step moved the weights
        sync.publish()
        assert distance(greedy(case.control), tmp_path / "trained") < 1e-5
        sync.close()
