"""What a difference between the engine's log-probs and HF's comes from: each cause is acted out in HF, and compared.

N tokens. e = engine - HF as it should be. A cause X, such as the weights of another version, gives log-probs of its
own; d = HF under X - HF as it should be. If X is the cause, e is a multiple of d and rounding: the multiple is 1 if X
is it exactly, and less if X is only the direction (weights saved 20 steps before, where the engine was one behind).

Rounding is large where the model is sensitive, in few tokens, and so is d: there a multiple fits by chance. So tokens
are weighted down where any of the differences is above the usual, and the fit is judged by prompts: what it explains of
a prompt is by the multiple of all the others.
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
"""Share of the squares."""
NOISE_FACTOR = 4.0
"""So many times the share of HF's own rounding that the cause explains; rounding leans a little towards flat
distributions, as earlier weights do."""
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
    """Of d, by weighted least squares."""
    significance: float
    """The multiple in its standard errors, by leaving out one prompt after the other."""
    explained: float
    """Share of the weighted squares of e that the multiple of d takes away, at most 1. Each prompt's by the multiple of
    the others, so below 0 where that makes it worse."""
    of_rounding: float
    """The same of HF's own rounding in the place of e, or 0."""
    mean_left: float
    """Mean absolute difference to the engine under this cause."""

    @property
    def holds(self) -> bool:
        """Whether the cause is seen in the difference at all."""
        enough = max(MIN_EXPLAINED, min(NOISE_FACTOR * self.of_rounding, 0.9))
        return self.significance >= MIN_SIGNIFICANCE and 0.03 < self.multiple < 2.0 and self.explained >= enough

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        names = ("multiple", "significance", "explained", "of_rounding", "mean_left")
        numbers = {name: getattr(self, name) for name in names}
        return {"cause": self.cause} | {n: v if math.isfinite(v) else None for n, v in numbers.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Unexplained:
    """Columns [N] of what is to be explained."""

    engine: Floats
    """As sampled."""
    expected: Floats
    """HF as it should be."""
    rounding: Floats
    """HF in the run's dtype - HF as it should be."""
    prompt: npt.NDArray[np.int64]
    """Which prompt the token's sample answers."""

    def by(self, cause: str, under_cause: Floats) -> Explanation:
        """Args: under_cause: [N] HF with the cause acted out; NaN where it says nothing."""
        on = np.isfinite(under_cause)
        e, d = (self.engine - self.expected)[on], (under_cause - self.expected)[on]
        left = float(np.abs(e - d).mean()) if on.any() else math.nan
        _, prompt = np.unique(self.prompt[on], return_inverse=True)
        if not d.any() or prompt.max() < 1:
            return Explanation(cause, 0.0, 0.0, 0.0, 0.0, left)
        own = self.rounding[on]
        weight = 1 / (np.abs(e).mean() ** 2 + e**2 + d**2 + own**2 + np.finfo(float).tiny)
        multiple, significance, explained = _fit(e, d, weight, prompt)
        of_rounding = max(_fit(own, d, weight, prompt)[2], 0.0)
        return Explanation(cause, multiple, significance, explained, of_rounding, left)


def _fit(e: Floats, d: Floats, weight: Floats, prompt: npt.NDArray[np.int64]) -> tuple[float, float, float]:
    """Multiple, significance and explained share, as `Explanation` has them.

    Args: e, d, weight: [N]; d is not all 0. prompt: [N] from 0, two or more.
    """
    ed, dd, ee = (np.bincount(prompt, weights=weight * x) for x in (e * d, d * d, e * e))
    rest = dd.sum() - dd
    without = np.divide(ed.sum() - ed, rest, out=np.zeros_like(rest), where=rest > 0)  # [prompts] of the others
    error = math.sqrt((len(dd) - 1) * float(without.var()))
    multiple = float(ed.sum() / dd.sum())
    left = float((ee - 2 * without * ed + without**2 * dd).sum())
    significance = multiple / error if error > 0 else math.copysign(math.inf, multiple) if multiple else 0.0
    return multiple, significance, 1.0 - left / float(ee.sum()) if ee.any() else 0.0


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
    """precision, temperature, support, stale weights, stale cache, stale tensor, routing, or bug."""
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
        degree = "" if 0.5 < found.multiple < 1.5 else f" (about {found.multiple:.0%} of the way there)"
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
