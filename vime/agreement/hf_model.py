"""Log-probs of whole sequences by HF transformers' own forward pass: a third opinion beside engine and trainer.

V vocabulary, D hidden.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vime.support import SamplingSupport

Supports = Sequence[SamplingSupport | None]
"""Of each sequence what its tokens were sampled from; None: from the whole vocabulary."""
WIDER = {"bfloat16": "float32", "float32": "float64"}
"""What a run's dtype is compared with: computing in it rounds so little that it counts as exact."""
_LOGITS_BYTES = 256 << 20
"""Of logits that exist at a time."""


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
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), trust_remote_code=False)
        self._model = model.eval().to(device)
        self._device, self._max_tokens = device, max_tokens

    def compute_in(self, dtype: str) -> None:
        """Compute in a wider dtype from now on, with the same weights: those that were rounded stay rounded."""
        # torch's grouped product knows no float64 at all, and float32 on some devices and releases.
        self._model.set_experts_implementation("eager")
        self._model = self._model.to(getattr(torch, dtype))

    @torch.no_grad()
    def log_probs(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        temperature: float = 1.0,
        supports: Supports | None = None,
    ) -> list[npt.NDArray[np.float64]]:
        """One [length] array for each sequence, NaN first; softmax(logits / temperature) in float32 or wider.

        Sequences of like length go through the model together, padded at the end, where a causal model does not look.

        Args: supports: what each sequence's tokens were sampled from, and are normalised over; None: the vocabulary.
        """
        scores: list[npt.NDArray[np.float64]] = [np.empty(0)] * len(sequences)
        for batch in _batches([len(s) for s in sequences], self._max_tokens):
            hidden = self._hidden([sequences[i] for i in batch])
            for row, i in enumerate(batch):
                tokens = torch.tensor(sequences[i], device=self._device)
                support = None if supports is None else supports[i]
                scores[i] = self._log_probs_of(hidden[row, : len(tokens) - 1], tokens[1:], temperature, support, 1)
        return scores

    @torch.no_grad()
    def log_probs_after(
        self,
        prefix_model: HfModel,
        sequences: Sequence[Sequence[int]],
        prefixes: Sequence[int],
        *,
        temperature: float = 1.0,
        supports: Supports | None = None,
    ) -> list[npt.NDArray[np.float64]]:
        """As `log_probs`, with the keys and values of each sequence's first tokens by another model.

        Sequences with prefixes of the same length go together.

        Args: prefixes: how many tokens of each sequence, fewer than it has.
        Returns: NaN up to the first token that this model predicts by itself, and everywhere where a prefix is of none.
        Raises: ValueError for a prefix that leaves nothing.
        """
        scores = [np.full(len(s), math.nan) for s in sequences]
        alike: dict[int, list[int]] = defaultdict(list)
        for i, (sequence, prefix) in enumerate(zip(sequences, prefixes, strict=True)):
            if prefix >= len(sequence):
                raise ValueError(f"a prefix of {prefix} of {len(sequence)} tokens leaves nothing to compute with")
            if prefix > 0:
                alike[prefix].append(i)
        for prefix, members in alike.items():
            for batch in _batches([len(sequences[i]) for i in members], self._max_tokens):
                chosen = [members[k] for k in batch]
                ids = self._ids([sequences[i] for i in chosen])
                cache = prefix_model._model.base_model(ids[:, :prefix], use_cache=True).past_key_values
                output = self._model.base_model(ids[:, prefix:], past_key_values=cache, use_cache=True)
                for row, i in enumerate(chosen):
                    end = len(sequences[i])
                    hidden = output.last_hidden_state[row, : end - prefix - 1]
                    support = None if supports is None else supports[i]
                    targets = ids[row, prefix + 1 : end]
                    scores[i][prefix:] = self._log_probs_of(hidden, targets, temperature, support, prefix + 1)
        return scores

    @torch.no_grad()
    def inside(self, sequence: Sequence[int]) -> tuple[list[Tensor], Mapping[int, Tensor]]:
        """What goes on in one sequence of n tokens.

        Returns: hidden states [n, D], float64 on the CPU: the embedding's, then each layer's; and of each layer with
            experts (counted from 0) the experts chosen, [n, experts] bool.
        """
        states: list[Tensor] = []
        routed: dict[int, Tensor] = {}
        base = self._model.base_model
        handles = [base.get_input_embeddings().register_forward_hook(lambda *a: states.append(_rows(a[2])))]
        for number, layer in enumerate(base.layers):
            handles.append(layer.register_forward_hook(lambda *a: states.append(_rows(a[2]))))
            gate = getattr(layer.mlp, "gate", None)
            if gate is not None and hasattr(gate, "top_k"):
                handles.append(
                    gate.register_forward_hook(lambda m, _, out, n=number: routed.update({n: _chosen(m, out)}))
                )
        try:
            self._hidden([sequence])
        finally:
            for handle in handles:
                handle.remove()
        return states, routed

    def tensor_names(self) -> list[str]:
        """Of the weights, tied ones once."""
        return [name for name, _ in self._model.named_parameters()]

    @contextmanager
    def with_tensors_of(self, other: HfModel, names: Iterable[str]) -> Iterator[None]:
        """These tensors are another model's while the block lasts."""
        mine, theirs = dict(self._model.named_parameters()), dict(other._model.named_parameters())
        kept = {name: mine[name].data for name in names}
        for name in kept:
            mine[name].data = theirs[name].data
        try:
            yield
        finally:
            for name, data in kept.items():
                mine[name].data = data

    def _hidden(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """[batch, longest, D] after the final norm."""
        hidden: Tensor = self._model.base_model(self._ids(sequences), use_cache=False).last_hidden_state
        return hidden

    def _ids(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """[batch, longest], padded at the end."""
        ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.long)
        for row, sequence in zip(ids, sequences, strict=True):
            row[: len(sequence)] = torch.tensor(sequence)
        return ids.to(self._device)

    def _log_probs_of(
        self, hidden: Tensor, targets: Tensor, temperature: float, support: SamplingSupport | None, start: int
    ) -> npt.NDArray[np.float64]:
        """[length], NaN first.

        Args:
            hidden: [length - 1, D]
            targets: [length - 1]
            support: of the whole sequence.
            start: the place of the first target in it.
        """
        head = self._model.get_output_embeddings()
        wide = torch.promote_types(head.weight.dtype, torch.float32)
        rows = max(1, _LOGITS_BYTES // (wide.itemsize * head.weight.shape[0]))
        parts = []
        for h, t in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True):
            logits = head(h).to(wide) / temperature
            if support is not None:
                logits.masked_fill_(_outside(support, start, logits), -math.inf)
            parts.append(logits.log_softmax(-1).gather(-1, t[:, None])[:, 0])
            start += len(t)
        first = torch.full((1,), math.nan, device=hidden.device, dtype=wide)
        array: npt.NDArray[np.float64] = torch.cat([first, *parts]).double().cpu().numpy()
        return array


def _outside(support: SamplingSupport, start: int, logits: Tensor) -> Tensor:
    """[n, V] true where a token could not have been sampled. Args: logits: [n, V] of the tokens from `start` on."""
    begins = support.starts[start : start + len(logits) + 1]
    counts = torch.from_numpy(np.diff(begins)).to(logits.device)
    ids = torch.from_numpy(support.ids[begins[0] : begins[-1]].astype(np.int64)).to(logits.device)
    outside = (counts > 0)[:, None].repeat(1, logits.shape[1])
    outside[torch.repeat_interleave(torch.arange(len(logits), device=logits.device), counts), ids] = False
    return outside


def _rows(output: Any) -> Tensor:
    """[1, n, D] as [n, D] on the CPU."""
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor[0].double().cpu()


def _chosen(gate: Any, output: tuple[Tensor, ...]) -> Tensor:
    """[n, experts] bool, of a router that gives (logits, weights, numbers)."""
    numbers = output[2]
    chosen = torch.zeros(numbers.shape[0], gate.num_experts, dtype=torch.bool, device=numbers.device)
    return chosen.scatter_(1, numbers, True).cpu()


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
