"""Log-probs of whole sequences by HF transformers' own forward pass: a third opinion beside engine and trainer.

V vocabulary, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_LOGITS_BYTES = 256 << 20
"""Of float32 logits that exist at a time."""


class HfModel:
    """A checkpoint in transformers.

    Args:
        folder: an HF checkpoint.
        dtype: what the weights are rounded to, "float32" or "bfloat16": that of the run.
        device: "cpu" or "cuda".
        max_tokens: padded tokens in one forward pass.
    """

    def __init__(self, folder: Path, *, dtype: str, device: str, max_tokens: int = 8192) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model = model.eval().to(device)
        self._device, self._max_tokens = device, max_tokens

    def to_float32(self) -> None:
        """Compute in float32 from now on, with the same weights: those that were rounded stay rounded."""
        self._model = self._model.float()

    @torch.no_grad()
    def log_probs(
        self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> list[npt.NDArray[np.float32]]:
        """One [length] array for each sequence, NaN first; softmax(logits / temperature) in float32.

        Sequences of like length go through the model together, padded at the end, where a causal model does not look.
        """
        scores: list[npt.NDArray[np.float32]] = [np.empty(0, np.float32)] * len(sequences)
        for batch in _batches([len(s) for s in sequences], self._max_tokens):
            hidden = self._hidden([sequences[i] for i in batch])
            for row, i in enumerate(batch):
                tokens = torch.tensor(sequences[i], device=self._device)
                scores[i] = self._log_probs_of(hidden[row, : len(tokens) - 1], tokens[1:], temperature)
        return scores

    def _hidden(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """[batch, longest, D] after the final norm."""
        ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.long)
        for row, sequence in zip(ids, sequences, strict=True):
            row[: len(sequence)] = torch.tensor(sequence)
        hidden: Tensor = self._model.base_model(ids.to(self._device), use_cache=False).last_hidden_state
        return hidden

    def _log_probs_of(self, hidden: Tensor, targets: Tensor, temperature: float) -> npt.NDArray[np.float32]:
        """Args: hidden: [length - 1, D]. targets: [length - 1]."""
        head = self._model.get_output_embeddings()
        rows = max(1, _LOGITS_BYTES // (4 * head.weight.shape[0]))
        parts = [
            (head(h).float() / temperature).log_softmax(-1).gather(-1, t[:, None])[:, 0]
            for h, t in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
        ]
        first = torch.full((1,), math.nan, device=hidden.device)
        array: npt.NDArray[np.float32] = torch.cat([first, *parts]).cpu().numpy()
        return array


def _batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Numbers of sequences to go together, the longest first, at most so many tokens with padding."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
