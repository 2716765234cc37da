"""Models for the agreement tests: random ones, and one that has learned a little."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch

from tests.agreement.scores import megatron
from tests.families import write_family
from vime.config import AlgoConfig, TrainConfig
from vime.loop.batch import make_train_batch
from vime.types import Group, Sample, SampleStatus, TrainBatch

END, PLUS, EQUALS, FIRST_DIGIT = 2, 13, 14, 3


def write_model(
    folder: Path, kind: str, *, tied: bool, dtype: torch.dtype = torch.float32, seed: int = 0, width: int = 128
) -> Path:
    """A small random checkpoint (vocabulary of 320) of a kind in tests/families.py. Args: width: of its MLP."""
    sizes = {
        "vocab_size": 320,
        "hidden_size": 128 if kind.startswith("qwen2") else 64,  # vLLM's Qwen2 has heads of hidden_size / heads
        "intermediate_size": width,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # the smallest vLLM's CPU attention takes
        "max_position_embeddings": 512,
        "eos_token_id": END,
    }
    write_family(folder, kind, sizes, tied=tied, dtype=dtype, seed=seed)
    return folder


def write_adder(folder: Path, scratch: Path, *, steps: int) -> Path:
    """A bf16 Qwen3 of the quickstart's size that was taught two-digit sums for some steps, by the trainer itself."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    settings = Qwen3Config(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=END,
        dtype=torch.bfloat16,
    )
    Qwen3ForCausalLM(settings).bfloat16().save_pretrained(scratch / "fresh")
    numbers = np.random.default_rng(0).integers(1, 100, (steps, 96, 2))
    with megatron(scratch / "fresh", scratch / "adder_rendezvous", algo=AlgoConfig(loss_type="sft_loss")) as trainer:
        for pairs in numbers.tolist():
            trainer.train(_lesson(pairs))
        trainer.export_hf(folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    return folder


def question(a: int, b: int) -> list[int]:
    """Token ids of "a+b="."""
    return [*_digits(a), PLUS, *_digits(b), EQUALS]


def _digits(number: int) -> list[int]:
    return [FIRST_DIGIT + int(digit) for digit in str(number)]


def _lesson(pairs: list[list[int]]) -> TrainBatch:
    samples = []
    for i, (a, b) in enumerate(pairs):
        answer = [*_digits(a + b), END]
        samples.append(
            Sample(
                tokens=(*question(a, b), *answer),
                response_length=len(answer),
                loss_mask=(1,) * len(answer),
                rollout_log_probs=(math.nan,) * len(answer),
                supervised=True,
                status=SampleStatus.COMPLETED,
                group_id=i,
                sample_id=i,
                trajectory_id=i,
            )
        )
    return train_batch(samples, AlgoConfig(loss_type="sft_loss"), max_tokens=2048)


def train_batch(samples: list[Sample], algo: AlgoConfig, *, max_tokens: int) -> TrainBatch:
    """One optimizer step over these samples, packed into micro-batches of at most so many tokens."""
    batch, _ = make_train_batch(
        [Group(s.group_id, [s]) for s in samples],
        rollout_id=0,
        algo=algo,
        train=TrainConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=max_tokens),
        dp_size=1,
        reward_key=None,
        global_batch_size=len(samples),
    )
    return batch
