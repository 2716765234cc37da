"""Causes of a difference, acted out in HF: what the engine would have said, were this the cause."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vime.agreement.explain import Explanation, Floats, Unexplained, best
from vime.agreement.hf_model import HfModel
from vime.agreement.tokens import Tokens

_LAYER = re.compile(r"(.*\blayers\.\d+)\.")
_ALL_OF_IT = 0.9
"""Share of the squares of which nothing is left that one part could explain."""
_MIN_OF_A_PART = 0.5
"""Share of the squares that a layer or a tensor must explain: rounding makes a sixteenth at most where they are tried,
and they are many."""


def explain(
    tokens: Tokens,
    model: HfModel,
    others: Mapping[str, HfModel],
    *,
    temperature: float,
    expected: Floats,
    rounding: Floats,
    bound: float,
) -> list[Explanation]:
    """Every cause that can be acted out with what is there, the best one first.

    Layers and tensors are tried one by one, which costs a forward pass each, only where the difference is above what
    rounding may make and no other cause accounts for it.

    Args:
        model: with the weights that are said to have sampled, in the wide dtype.
        others: in words -> a model with other saved weights of the run, in the same dtype.
        expected: [N] log-probs by `model`.
        rounding: [N] HF's in the run's dtype - expected.
        bound: the mean difference that rounding may make.
    """
    found = []
    sequences = tokens.sequences
    open_question = Unexplained(tokens.engine, expected, rounding, tokens.prompt)
    for words, raw in _without_settings(tokens, temperature):
        found.append(open_question.by(words, tokens.pick(model.log_probs(sequences, **raw))))
    for words, other in others.items():
        stale = tokens.pick(other.log_probs(sequences, temperature=temperature, supports=tokens.supports))
        found.append(open_question.by(f"stale weights: it had {words}", stale))
        cached = _after_cached_prompts(tokens, model, other, temperature)
        found.append(open_question.by(f"stale cache: keys and values of prompts were of {words}", cached))
    so_far = best(found)
    if np.abs(tokens.engine - expected).mean() > bound and (so_far is None or so_far.explained < _ALL_OF_IT):
        for words, other in others.items():
            found += _one_part(tokens, model, other, words, temperature, open_question)
    return sorted(found, key=lambda x: (not x.holds, -x.explained))


def _without_settings(tokens: Tokens, temperature: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Words for log-probs before some of the settings of sampling were applied, and how HF makes them."""
    whole = "over the whole vocabulary, before top-p, top-k and min-p were applied"
    if temperature != 1.0:
        words = "temperature: the log-probs are those before the temperature was applied"
        yield words, {"supports": tokens.supports}
    if tokens.is_narrow:
        yield f"support: the log-probs are those {whole}", {"temperature": temperature}
    if tokens.is_narrow and temperature != 1.0:
        yield f"support: the log-probs are those without the temperature and {whole}", {}


def _after_cached_prompts(tokens: Tokens, model: HfModel, other: HfModel, temperature: float) -> Floats:
    """[N] with all of the prompt but its last token by the other weights; NaN where a prompt is too short."""
    prefixes = [len(sample.tokens) - sample.response_length - 1 for sample in tokens.samples]
    scores = model.log_probs_after(other, tokens.sequences, prefixes, temperature=temperature, supports=tokens.supports)
    return tokens.pick(scores)


def _one_part(
    tokens: Tokens, model: HfModel, other: HfModel, words: str, temperature: float, open_question: Unexplained
) -> Iterator[Explanation]:
    """One layer that was left at the other weights; then, of the best layer, one tensor."""

    def tried(what: str, names: Sequence[str]) -> Explanation:
        with model.with_tensors_of(other, names):
            scores = model.log_probs(tokens.sequences, temperature=temperature, supports=tokens.supports)
        return open_question.by(f"stale tensor: {what} was of {words}", tokens.pick(scores))

    parts = _parts(model.tensor_names())
    layers = {part: tried(part, names) for part, names in parts.items()}
    # A layer shows that one of its many tensors is stale, though it explains little of it.
    part = max(parts, key=lambda name: layers[name].significance)
    tensors = [tried(name, [name]) for name in parts[part]] if len(parts[part]) > 1 else []
    for found in (best(layers), best(tensors)):
        if found is not None and found.explained >= _MIN_OF_A_PART:
            yield found


def _parts(names: Sequence[str]) -> dict[str, list[str]]:
    """Layer, or tensor that is in none -> names."""
    parts: dict[str, list[str]] = defaultdict(list)
    for name in names:
        match = _LAYER.match(name)
        parts[match[1] if match else name].append(name)
    return dict(parts)
