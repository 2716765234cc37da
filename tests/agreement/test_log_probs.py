"""HF, Megatron and vLLM give the same log-probs for the same weights and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.agreement.models import END, question, train_batch, write_adder, write_model
from tests.agreement.scores import Job, Sampled, hf_scores, largest, load_hf, mean, megatron, sample_with_vllm
from vime.config import AlgoConfig, RolloutConfig

pytestmark = pytest.mark.engine

# name -> kind in tests/families.py, tied head, temperature
FLOAT32 = {
    "qwen3": ("qwen3", False, 1.0),
    "qwen3-tied": ("qwen3", True, 0.7),
    "llama": ("llama", False, 0.7),
    "llama-tied": ("llama", True, 1.0),
    "qwen2-tied": ("qwen2", True, 0.7),
    "qwen3-moe": ("qwen3_moe", False, 1.0),
    "glm": ("glm4_moe", False, 0.7),
}
SLOW = {
    "llama-rope": ("llama-rope", False, 1.0),
    "qwen2-yarn": ("qwen2-yarn", False, 0.7),
    "qwen3-moe-mixed": ("qwen3_moe-mixed", True, 0.7),
    "glm-groups": ("glm4_moe-groups", False, 1.0),
}
BFLOAT16 = {"llama-bf16": "llama", "qwen3-moe-bf16": "qwen3_moe", "glm-bf16": "glm4_moe"}
EACH = [*FLOAT32, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
EACH_BFLOAT16 = [
    *("adder", "llama-bf16"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3-moe-bf16", "glm-bf16")),
]
PROMPTS = [np.random.default_rng(i).integers(3, 320, length).tolist() for i, length in enumerate((2, 9, 33, 70))]
SUMS = [question(a, b) for a, b in np.random.default_rng(7).integers(1, 100, (64, 2)).tolist()]


@dataclass(frozen=True)
class Case:
    """A model and what vLLM sampled from it."""

    folder: Path
    sampled: Sampled
    temperature: float


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Every model of the tests to come, sampled from by one vLLM process."""
    root = tmp_path_factory.mktemp("agreement")
    wanted = {test.callspec.params.get("name") for test in request.session.items if hasattr(test, "callspec")}
    jobs = {
        name: Job(write_model(root / name, kind, tied=tied), PROMPTS, temperature=temperature)
        for name, (kind, tied, temperature) in (FLOAT32 | SLOW).items()
        if name in wanted
    }
    adder = write_adder(root / "adder", root, steps=80)
    jobs["adder"] = Job(adder, SUMS, n=8, max_tokens=5, stop_token_ids=(END,))
    for name, kind in BFLOAT16.items():
        if name in wanted:
            model = write_model(root / name, kind, tied=kind == "llama", dtype=torch.bfloat16)
            jobs[name] = Job(model, PROMPTS, n=8)
    sampled = sample_with_vllm(list(jobs.values()), root)
    return {
        name: Case(job.model, result, job.temperature)
        for (name, job), result in zip(jobs.items(), sampled, strict=True)
    }


@pytest.mark.parametrize("name", EACH)
def test_hf_and_megatron_give_the_same_distribution_over_the_whole_vocabulary(
    cases: dict[str, Case], name: str, tmp_path: Path
) -> None:
    folder, prefix = cases[name].folder, PROMPTS[1]
    with torch.no_grad():
        want = load_hf(folder)(torch.tensor([prefix])).logits[0, -1].log_softmax(-1).numpy()
    with megatron(folder, tmp_path / "rendezvous") as trainer:
        got = [score[-1] for score in trainer.score([(*prefix, token) for token in range(len(want))])]
    assert np.abs(want.max() - want.min()) > 2  # a flat distribution would hide differences
    assert largest(np.array(got), want) < 1e-5


@pytest.mark.parametrize("name", EACH)
def test_all_three_give_the_same_log_probs_of_sampled_tokens(cases: dict[str, Case], name: str, tmp_path: Path) -> None:
    sampled, temperature = cases[name].sampled, cases[name].temperature
    hf = sampled.of_responses(hf_scores(load_hf(cases[name].folder), sampled.sequences, temperature))
    batch = train_batch(sampled.samples(), AlgoConfig(), max_tokens=400)
    assert len(batch.steps[0][0]) > 2  # several packed micro-batches
    rollout = RolloutConfig(rollout_temperature=temperature)
    with megatron(cases[name].folder, tmp_path / "rendezvous", rollout=rollout) as trainer:
        ours = trainer.log_probs(batch)[batch.loss_mask != 0]
        metrics = trainer.train(batch)
    assert len(sampled.log_probs) > 400
    print(f"\n{name}: ours-HF {largest(ours, hf):.1e}, ours-vLLM {largest(ours, sampled.log_probs):.1e}")
    assert largest(ours, hf) < 1e-5
    assert largest(ours, sampled.log_probs) < 1e-5
    assert largest(hf, sampled.log_probs) < 1e-5
    assert metrics["train/train_rollout_logprob_abs_diff_max"] < 1e-5  # and so says every step's log


@pytest.mark.parametrize("name", EACH_BFLOAT16)
def test_bf16_is_no_further_from_vllm_than_hf_is(cases: dict[str, Case], name: str, tmp_path: Path) -> None:
    sampled = cases[name].sampled
    hf = sampled.of_responses(hf_scores(load_hf(cases[name].folder, torch.bfloat16), sampled.sequences))
    batch = train_batch(sampled.samples(), AlgoConfig(), max_tokens=1000)
    with megatron(cases[name].folder, tmp_path / "rendezvous") as trainer:
        ours = trainer.log_probs(batch)[batch.loss_mask != 0]
    figures = (mean(ours, sampled.log_probs), mean(hf, sampled.log_probs), mean(ours, hf))
    print(
        f"\n{name}: {len(ours)} tokens, ours-vLLM {figures[0]:.5f}, HF-vLLM {figures[1]:.5f}, ours-HF {figures[2]:.5f}"
    )
    assert len(ours) > 900
    assert figures[0] <= 1.2 * figures[1] + 1e-4  # 1e-4: noise of a thousand tokens
    assert figures[0] <= 1.2e-2
