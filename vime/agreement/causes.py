"""Causes of a difference, acted out in HF: what the engine would have said, were this the cause."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from vime.agreement.explain import Explanation, Floats, best, explanation
from vime.agreement.hf_model import HfModel
from vime.agreement.tokens import Tokens

_LAYER = re.compile(r"(.*\blayers\.\d+)\.")


def explain(
    tokens: Tokens, model: HfModel, others: Mapping[str, HfModel], *, temperature: float, expected: Floats
) -> list[Explanation]:
    """Every cause that can be acted out with what is there, the best one first.

    Args:
        model: with the weights that are said to have sampled, in the wide dtype.
        others: in words -> a model with other saved weights of the run, in the same dtype.
        expected: [N] log-probs by `model`.
    """
    found = []
    sequences = tokens.sequences
    if temperature != 1.0:
        raw = tokens.pick(model.log_probs(sequences))
        found.append(
            explanation(
                "temperature: the log-probs are those before the temperature was applied",
                tokens.engine,
                expected,
                raw,
            )
        )
    for words, other in others.items():
        stale = tokens.pick(other.log_probs(sequences, temperature=temperature))
        found.append(explanation(f"stale weights: it had {words}", tokens.engine, expected, stale))
        cached = _after_cached_prompts(tokens, model, other, temperature)
        known = np.isfinite(cached)
        found.append(
            explanation(
                f"stale cache: keys and values of prompts were of {words}",
                tokens.engine[known],
                expected[known],
                cached[known],
            )
        )
        found += _one_part(tokens, model, other, words, temperature, expected)
    return sorted(found, key=lambda x: (not x.holds, -x.explained))


def _after_cached_prompts(tokens: Tokens, model: HfModel, other: HfModel, temperature: float) -> Floats:
    """[N] with all of the prompt but its last token by the other weights; NaN where a prompt is too short."""
    scores = []
    for sample in tokens.samples:
        prefix = len(sample.tokens) - sample.response_length - 1
        if prefix < 1:
            scores.append(np.full(len(sample.tokens), np.nan))
        else:
            scores.append(model.log_probs_after(other, sample.tokens, prefix, temperature=temperature))
    return tokens.pick(scores)


def _one_part(
    tokens: Tokens, model: HfModel, other: HfModel, words: str, temperature: float, expected: Floats
) -> Iterator[Explanation]:
    """One layer that was left at the other weights; then, of the best layer, one tensor."""

    def tried(what: str, names: Sequence[str]) -> Explanation:
        with model.with_tensors_of(other, names):
            scores = tokens.pick(model.log_probs(tokens.sequences, temperature=temperature))
        return explanation(f"stale tensor: {what} was of {words}", tokens.engine, expected, scores)

    parts = _parts(model.tensor_names())
    layers = {part: tried(part, names) for part, names in parts.items()}
    found = best(layers)
    if found is None:
        return
    part = next(name for name, entry in layers.items() if entry is found)
    tensors = [tried(name, [name]) for name in parts[part]] if len(parts[part]) > 1 else []
    yield found
    if (tensor := best(tensors)) is not None:
        yield tensor


def _parts(names: Sequence[str]) -> dict[str, list[str]]:
    """Layer, or tensor that is in none -> names."""
    parts: dict[str, list[str]] = defaultdict(list)
    for name in names:
        match = _LAYER.match(name)
        parts[match[1] if match else name].append(name)
    return dict(parts)
