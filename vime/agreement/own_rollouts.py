"""Samples of a checkpoint that has no rollouts: prompts of our own, sampled by an engine started for it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from vime.config.hf import tokenizer_problem

_TEXTS = (
    "The three primary colours are",
    "def fibonacci(n):",
    "Q: What is 17 + 25?\nA:",
    "Once upon a time, in a small village by the sea, there lived",
    "The derivative of x squared is",
    "To make bread, you first",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n\nI am writing to",
)
_RANDOM_LENGTHS = (3, 9, 17, 33)


def own_prompts(folder: Path) -> list[list[int]]:
    """Token ids: a few texts, or random ids where the checkpoint has no tokenizer."""
    if tokenizer_problem(folder) is None:
        from vime.config.hf import load_tokenizer

        tokenizer = load_tokenizer(folder)
        return [_plain(tokenizer(text)["input_ids"]) for text in _TEXTS]
    size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    numbers = np.random.default_rng(0)
    return [_plain(numbers.integers(3, size, length)) for length in _RANDOM_LENGTHS * 2]


def _plain(ids: Iterable[Any]) -> list[int]:
    return [int(i) for i in ids]
