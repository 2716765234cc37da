"""The same tokens, scored by everybody under the weights that sampled them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vime.agreement.difference import Difference, difference
from vime.agreement.tokens import Floats, Tokens

ENGINE, TRAINER, FRESH = "engine", "trainer", "engine anew"
"""The engine when it sampled, the trainer's model now, and an engine newly started."""
_METRIC = "train/train_rollout_logprob_abs_diff"


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What the run's own metrics say of trainer and engine at a step."""

    mean: float
    p99: float
    max: float

    @classmethod
    def of(cls, metrics: Mapping[str, Any] | None) -> RunFigures | None:
        """None where the step has no such metrics."""
        if metrics is None or metrics.get(_METRIC) is None:
            return None
        values = [metrics.get(f"{_METRIC}{part}") for part in ("", "_p99", "_max")]
        return cls(*(math.nan if value is None else float(value) for value in values))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of one rollout."""

    step: int | None
    """None: of no run."""
    version: int
    origin: str
    """Of the weights, in words."""
    tokens: Tokens
    temperature: float
    scores: Mapping[str, Floats]
    """Who -> [N] log-probs; ENGINE first, HF in the widest dtype last. NaN where somebody did not score a token."""
    run: RunFigures | None
    """Over all samples of the step, by the run itself."""
    notes: Sequence[str] = ()

    def difference(self, a: str, b: str) -> Difference:
        """Of a to b, over the tokens that both scored."""
        one, other = self.scores[a], self.scores[b]
        both = np.isfinite(one) & np.isfinite(other)
        return difference(one[both], other[both], self.tokens.trajectory[both])

    def differences(self) -> dict[str, Difference]:
        """Everybody to the engine, then everybody to the last, the most exact."""
        names = list(self.scores)
        pairs = [(name, ENGINE) for name in names[1:]] + [(name, names[-1]) for name in names[1:-1]]
        return {f"{a} - {b}": self.difference(a, b) for a, b in pairs}

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        run = None
        if self.run is not None:
            run = {name: getattr(self.run, name) for name in ("mean", "p99", "max")}
            run = {name: value if math.isfinite(value) else None for name, value in run.items()}
        return {
            "step": self.step,
            "version": self.version,
            "weights": self.origin,
            "num_samples": len(self.tokens.samples),
            "num_tokens": len(self.tokens.place),
            "temperature": self.temperature,
            "trainer - engine, by the run": run,
            "differences": {name: d.to_json() for name, d in self.differences().items()},
            "notes": list(self.notes),
        }


def as_text(comparison: Comparison) -> str:
    """A table of who differs from whom."""
    step = "" if comparison.step is None else f"step {comparison.step}: "
    lines = [
        f"{step}{comparison.origin}, version {comparison.version}; {len(comparison.tokens.samples)} samples, "
        f"{len(comparison.tokens.place):,} tokens, temperature {comparison.temperature:g}",
        f"  {'nats':<32}{'mean':>11}{'p99':>11}{'max':>11}{'signed':>11}{'k3':>11}",
    ]
    if comparison.run is not None:
        own = comparison.run
        lines.append(f"  {'trainer - engine, by the run':<32}{own.mean:>11.2e}{own.p99:>11.2e}{own.max:>11.2e}")
    for name, d in comparison.differences().items():
        lines.append(f"  {name:<32}{d.mean:>11.2e}{d.p99:>11.2e}{d.max:>11.2e}{d.signed:>+11.1e}{d.k3:>11.2e}")
    return "\n".join([*lines, *(f"  note: {note}" for note in comparison.notes)])


def summary(comparisons: Sequence[Comparison]) -> str:
    """Mean absolute differences to the engine, a row for each step."""
    names = list(comparisons[0].scores)[1:]
    lines = [
        "mean absolute difference to the engine, in nats",
        f"{'step':>6}{'trainer (run)':>16}" + "".join(f"{name:>16}" for name in names),
    ]
    for c in comparisons:
        own = f"{c.run.mean:.3e}" if c.run is not None else "-"
        lines.append(
            f"{'-' if c.step is None else c.step:>6}{own:>16}"
            + "".join(f"{c.difference(name, ENGINE).mean:>16.3e}" for name in names)
        )
    return "\n".join(lines)
