"""What goes on inside trainer and HF on the same sequences: hidden states layer by layer, and routers' choices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vime.agreement.explain import PRECISION_FACTOR, Flips
from vime.agreement.tokens import Tokens
from vime.types import RoutedExperts

_FLOOR = 1e-5
"""Relative difference of hidden states that float32 sums in another order may have."""


class SeenInside(Protocol):
    """HfModel, and the trainer's Scorer."""

    def inside(self, sequence: Sequence[int]) -> tuple[list[Tensor], Mapping[int, Tensor]]:
        """Hidden states of the embedding and of each layer, and each router's choice."""


class SeenInsideWithExperts(Protocol):
    """The trainer's Scorer."""

    def inside(
        self, sequence: Sequence[int], routed_experts: RoutedExperts | None = None
    ) -> tuple[list[Tensor], Mapping[int, Tensor]]:
        """As SeenInside's, with the experts of the sequence's tokens where they are given."""


@dataclass(frozen=True, slots=True)
class Insides:
    """Of some samples: one entry each in the lists below."""

    samples: tuple[int, ...]
    """Which of `Tokens.samples`."""
    states: tuple[list[Tensor], ...]
    routed: tuple[Mapping[int, Tensor], ...]


def look_inside(model: SeenInside, tokens: Tokens, samples: Sequence[int]) -> Insides:
    """Run some of the samples through a model."""
    return _seen([model.inside(tokens.samples[i].tokens) for i in samples], samples)


def look_inside_with_experts(
    model: SeenInsideWithExperts, tokens: Tokens, samples: Sequence[int], routed_experts: RoutedExperts | None
) -> Insides:
    """The same, with the given experts of all the tokens where there are some."""
    if routed_experts is None:
        return look_inside(model, tokens, samples)
    starts = routed_experts.starts
    rows = [
        RoutedExperts(routed_experts.rows[starts[i] : starts[i + 1]], routed_experts.known[i : i + 1]) for i in samples
    ]
    return _seen(
        [model.inside(tokens.samples[i].tokens, given) for i, given in zip(samples, rows, strict=True)], samples
    )


def _seen(seen: Sequence[tuple[list[Tensor], Mapping[int, Tensor]]], samples: Sequence[int]) -> Insides:
    return Insides(tuple(samples), tuple(s for s, _ in seen), tuple(r for _, r in seen))


def by_layer(one: Insides, other: Insides) -> list[float]:
    """Relative difference of the hidden states: after the embedding, then after each layer.

    The norm of the difference by the norm of `other`'s state, averaged over tokens.
    """
    parts: list[list[Tensor]] = []
    for a, b in zip(one.states, other.states, strict=True):
        parts.append([_relative(x.double(), y.double()) for x, y in zip(a, b, strict=True)])
    return [float(torch.cat(list(layer)).mean()) for layer in zip(*parts, strict=True)]


def _relative(one: Tensor, other: Tensor) -> Tensor:
    """[n]. A padding token's embedding is 0."""
    norms = [torch.linalg.vector_norm(x, dim=-1) for x in (one - other, other)]
    relative: Tensor = norms[0] / norms[1].clamp_min(1e-30)
    return relative


def first_layer_apart(differences: Sequence[float], own_rounding: Sequence[float]) -> str | None:
    """Where one difference leaves what rounding makes; None if nowhere.

    Args: differences, own_rounding: as `by_layer` gives them; the second of HF in the run's dtype to the wider one.
    """
    for k, (apart, rounding) in enumerate(zip(differences, own_rounding, strict=True)):
        if not apart <= max(PRECISION_FACTOR * rounding, _FLOOR):
            return "the embedding" if k == 0 else f"layer {k - 1}"
    return None


def flips_by_layer(one: Insides, other: Insides) -> dict[int, float]:
    """Of each layer with experts, the share of tokens for which the two chose different experts."""
    layers = sorted(other.routed[0]) if other.routed else []
    return {
        layer: float(
            torch.cat([(a[layer] != b[layer]).any(-1) for a, b in zip(one.routed, other.routed, strict=True)])
            .double()
            .mean()
        )
        for layer in layers
    }


def recorded(tokens: Tokens, like: Insides) -> Insides | None:
    """The engine's recorded experts as insides without states; None where a sample has no full record.

    The row of a last token is nobody's: it touches no log-prob.
    """
    routed: list[Mapping[int, Tensor]] = []
    for i, theirs in zip(like.samples, like.routed, strict=True):
        rows = tokens.samples[i].routed_experts
        if rows is None or len(rows) < len(tokens.samples[i].tokens) - 1 or not theirs:
            return None
        chosen = {}
        for layer, other in theirs.items():
            mine = torch.zeros_like(other)
            mine[: len(rows)].scatter_(1, torch.from_numpy(rows[: len(other), layer].astype(np.int64)), True)
            mine[len(rows) :] = other[len(rows) :]
            chosen[layer] = mine
        routed.append(chosen)
    return Insides(like.samples, (), tuple(routed))


def flips(one: Insides, other: Insides, tokens: Tokens, apart: npt.NDArray[np.float64]) -> Flips | None:
    """Whether the difference of log-probs lies where routers differ; None for a dense model.

    Args: apart: [N] absolute differences of log-probs of the tokens.
    """
    if not other.routed or not other.routed[0]:
        return None
    flipped, values = [], []
    for sample, a, b in zip(other.samples, one.routed, other.routed, strict=True):
        rows: Any = torch.stack([(a[layer] != b[layer]).any(-1) for layer in b]).any(0).numpy()
        mine = tokens.sample == sample
        flipped.append(rows[tokens.place[mine] - 1])  # the row that predicts the token
        values.append(apart[mine])
    is_flipped, value = np.concatenate(flipped), np.concatenate(values)

    def mean(mask: npt.NDArray[np.bool_]) -> float:
        return float(value[mask].mean()) if mask.any() else math.nan

    return Flips(float(is_flipped.mean()), mean(is_flipped), mean(~is_flipped))
