"""What a difference between the engine's log-probs and HF's comes from: each cause is acted out in HF, and compared.

N tokens. e = engine - HF as it should be. A cause X, such as the weights of another version, gives log-probs of its
own; d = HF under X - HF as it should be. If X is the cause, e is a multiple of d and rounding: the multiple is 1 if X
is it exactly, and less if X is only the direction (weights saved 20 steps before, where the engine was one behind).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MIN_SIGNIFICANCE = 6.0
"""Standard errors that the multiple must be from 0; noise gives 1, and several causes are tried."""
MIN_EXPLAINED = 0.05
"""Share of the squares; rounding leans a little towards flat distributions, as earlier weights do."""
PRECISION_FACTOR = 4.0
"""Rounding may make this many times the difference that HF's own rounding makes."""
FLOAT32_BOUND = 1e-5
"""Mean difference that two float32 programs may have, where HF's own rounding says less."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Explanation:
    """How well one cause accounts for the engine's difference."""

    cause: str
    multiple: float
    """Of d, by least squares."""
    significance: float
    """The multiple in its standard errors."""
    explained: float
    """Share of the sum of squares of e that the multiple of d takes away, 0 to 1."""
    mean_left: float
    """Mean absolute difference to the engine under this cause."""

    @property
    def holds(self) -> bool:
        """Whether the cause is seen in the difference at all."""
        return self.significance >= MIN_SIGNIFICANCE and 0.03 < self.multiple < 2.0 and self.explained >= MIN_EXPLAINED

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        names = ("multiple", "significance", "explained", "mean_left")
        numbers = {name: getattr(self, name) for name in names}
        return {"cause": self.cause} | {n: v if math.isfinite(v) else None for n, v in numbers.items()}


def explanation(cause: str, engine: Floats, expected: Floats, under_cause: Floats) -> Explanation:
    """Args: engine: [N] as sampled. expected: [N] HF as it should be. under_cause: [N] HF with the cause acted out."""
    e, d = engine - expected, under_cause - expected
    squares = float(d @ d)
    left = float(np.abs(engine - under_cause).mean())
    if squares == 0.0 or len(e) < 3:
        return Explanation(cause, 0.0, 0.0, 0.0, left)
    multiple = float(e @ d) / squares
    rest = e - multiple * d
    error = math.sqrt(float(rest @ rest) / (len(e) - 1) / squares)
    total = float(e @ e)
    return Explanation(
        cause=cause,
        multiple=multiple,
        significance=multiple / error if error > 0 else math.inf,
        explained=1.0 - float(rest @ rest) / total if total > 0 else 0.0,
        mean_left=left,
    )


def best(explanations: Mapping[str, Explanation] | list[Explanation]) -> Explanation | None:
    """The cause that accounts for most, of those that hold; None if none does."""
    values = explanations.values() if isinstance(explanations, Mapping) else explanations
    holding = [x for x in values if x.holds]
    return max(holding, key=lambda x: x.explained) if holding else None


def precision_bound(own_rounding: float, dtype: str) -> float:
    """The mean difference that rounding may make.

    Args: own_rounding: mean difference of HF in the run's dtype to HF in a wider one, on the same tokens.
    """
    bound = PRECISION_FACTOR * own_rounding
    return max(bound, FLOAT32_BOUND) if dtype == "float32" else bound


@dataclass(frozen=True, slots=True)
class Flips:
    """Tokens before which some router chose other experts than HF's, and the others."""

    share: float
    mean_with: float
    mean_without: float
    """Mean absolute difference of log-probs, of tokens with a flip in their own row and of those without."""

    @property
    def account(self) -> bool:
        """Whether flips are where the difference is."""
        if not 0 < self.share < 1:
            return False  # none, or no others to compare with
        elsewhere = (1 - self.share) * self.mean_without
        return self.mean_with >= 3 * self.mean_without and self.share * self.mean_with >= elsewhere


@dataclass(frozen=True, slots=True)
class Verdict:
    """One word, and a sentence."""

    word: str
    """precision, temperature, stale weights, stale cache, stale tensor, routing, or bug."""
    sentence: str


def verdict_on_engine(
    mean: float, bound: float, found: Explanation | None, flips: Flips | None, fresh_mean: float | None
) -> Verdict:
    """What the engine's difference to HF comes from.

    Args:
        mean: mean absolute difference of the engine, at sampling, to HF in the wider dtype.
        bound: what rounding may make.
        found: the best explanation; its cause begins with a word of `Verdict` and a colon.
        flips: of the engine's recorded experts or of the trainer's; None for a dense model.
        fresh_mean: the same mean of an engine newly started with these weights, at temperature 1; None if none was.
    """
    if found is not None:
        word, _, rest = found.cause.partition(": ")
        degree = "" if 0.8 < found.multiple < 1.25 else f" (about {found.multiple:.0%} of the way there)"
        return Verdict(
            word, f"{rest}{degree}: it accounts for {found.explained:.0%} of the squared difference, {mean:.1e} nats"
        )
    if mean <= bound:
        return Verdict("precision", f"{mean:.1e} nats, within the {bound:.1e} that rounding may make")
    if flips is not None and flips.account:
        return Verdict("routing", f"{mean:.1e} nats, most of it where {_routers(flips)}")
    text = f"{mean:.1e} nats, above the {bound:.1e} that rounding may make, and no cause that was tried accounts for it"
    if fresh_mean is not None and fresh_mean <= bound:
        text += (
            f"; an engine newly started with these weights is within it ({fresh_mean:.1e}), so the run's engine held "
            "others, or sampled by other settings"
        )
    elif fresh_mean is not None:
        text += (
            f"; an engine newly started with these weights differs, too ({fresh_mean:.1e}): it computes another model"
        )
    return Verdict("bug", text)


def verdict_on_trainer(mean: float, bound: float, flips: Flips | None, first_layer: str | None) -> Verdict:
    """What the trainer's difference to HF comes from, under the same weights.

    Args: first_layer: where hidden states first differ by more than rounding makes; None if nowhere.
    """
    if mean <= bound:
        return Verdict("precision", f"{mean:.1e} nats, within the {bound:.1e} that rounding may make")
    if flips is not None and flips.account:
        return Verdict("routing", f"{mean:.1e} nats, most of it where {_routers(flips)}")
    where = (
        f"; hidden states first differ in {first_layer}" if first_layer else "; hidden states agree, the head does not"
    )
    return Verdict("bug", f"{mean:.1e} nats, above the {bound:.1e} that rounding may make{where}")


def _routers(flips: Flips) -> str:
    return (
        f"routers chose other experts ({flips.share:.1%} of the tokens, {flips.mean_with:.1e} nats there and "
        f"{flips.mean_without:.1e} elsewhere)"
    )
