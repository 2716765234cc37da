"""The same log-probs by HF, by the trainer and by vLLM, and how far they are apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vime.config import Config
from vime.engine.vllm.processes import import_path
from vime.platform.cpu import CpuPlatform
from vime.trainer.megatron.trainer import MegatronTrainer
from vime.types import Sample, SampleStatus

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What vLLM sampled from a model, and the log-probs it gave."""

    prompts: tuple[tuple[int, ...], ...]
    responses: tuple[tuple[int, ...], ...]
    log_probs: Floats
    """[R] of all responses' tokens, end to end."""

    @property
    def sequences(self) -> list[tuple[int, ...]]:
        """Prompt and response of each sample."""
        return [(*p, *r) for p, r in zip(self.prompts, self.responses, strict=True)]

    def samples(self) -> list[Sample]:
        """The same as a rollout function would return them, rewarded at random."""
        samples, at = [], 0
        for i, (prompt, response) in enumerate(zip(self.prompts, self.responses, strict=True)):
            sample = Sample(tokens=prompt, status=SampleStatus.COMPLETED, group_id=i, sample_id=i, trajectory_id=i)
            sample.append_response(response, [min(0.0, x) for x in self.log_probs[at : at + len(response)]], version=1)
            sample.reward = float(i % 2)
            at += len(response)
            samples.append(sample)
        return samples

    def of_responses(self, scores: Sequence[npt.NDArray[np.floating]]) -> Floats:
        """[R] the responses' part of each sequence's scores."""
        parts = [np.asarray(s, np.float64)[len(p) :] for s, p in zip(scores, self.prompts, strict=True)]
        return np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class Job:
    """What to sample from a model."""

    model: Path
    prompts: list[list[int]]
    n: int = 4
    max_tokens: int = 32
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        names = ("prompts", "n", "max_tokens", "temperature", "stop_token_ids")
        return {"model": str(self.model), **{name: getattr(self, name) for name in names}}


def sample_with_vllm(jobs: Sequence[Job], scratch: Path) -> list[Sampled]:
    """Run the jobs in one process of their own; see sample_with_vllm.py."""
    (scratch / "jobs.json").write_text(json.dumps([job.to_json() for job in jobs]))
    environment = {**os.environ, **CpuPlatform().engine_environment(), "VLLM_LOGGING_LEVEL": "WARNING"}
    environment |= {"PYTHONPATH": import_path(environment), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-m", "tests.agreement.sample_with_vllm", scratch / "jobs.json", scratch / "out.json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [
        Sampled(
            prompts=tuple(tuple(s["prompt"]) for s in samples),
            responses=tuple(tuple(s["tokens"]) for s in samples),
            log_probs=np.array([x for s in samples for x in s["log_probs"]]),
        )
        for samples in json.loads((scratch / "out.json").read_text())
    ]


def hf_scores(
    model: Any, sequences: Sequence[Sequence[int]], temperature: float = 1.0
) -> list[npt.NDArray[np.float32]]:
    """[length] log-probs of each sequence by transformers' own forward, NaN first; logits are cast to float32."""
    scores = []
    for sequence in sequences:
        ids = torch.tensor([list(sequence)])
        with torch.no_grad():
            log_probs = (model(ids).logits[0, :-1].float() / temperature).log_softmax(-1)
        picked = log_probs.gather(-1, ids[0, 1:, None])[:, 0].numpy()
        scores.append(np.concatenate([[np.nan], picked]).astype(np.float32))
    return scores


def load_hf(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@contextmanager
def megatron(folder: Path, rendezvous: Path, *, writer: Any = None, **sections: Any) -> Iterator[MegatronTrainer]:
    """A trainer of the checkpoint in its own dtype."""
    trainer = MegatronTrainer(
        Config(megatron={"lr": 3e-3, "adam_beta2": 0.95}, **sections),
        hf_path=str(folder),
        platform=CpuPlatform(),
        rank=0,
        world_size=1,
        init_method=f"file://{rendezvous}",
        total_steps=100,
        writer=writer,
    )
    try:
        yield trainer
    finally:
        trainer.close()


def largest(a: Floats, b: Floats) -> float:
    """Largest absolute difference."""
    return float(np.abs(a - b).max())


def mean(a: Floats, b: Floats) -> float:
    """Mean absolute difference."""
    return float(np.abs(a - b).mean())
