"""The comparison of one rollout: the same tokens, scored by everybody under the weights that sampled them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vime.agreement.difference import Difference, difference
from vime.agreement.tokens import Tokens

ENGINE = "engine"
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
        return cls(*(float(metrics.get(f"{_METRIC}{part}") or math.nan) for part in ("", "_p99", "_max")))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of one rollout."""

    step: int
    version: int | None
    origin: str
    """Of the weights, in words."""
    tokens: Tokens
    temperature: float
    scores: Mapping[str, npt.NDArray[np.float64]]
    """Who -> [N] log-probs; the engine's at sampling among them, as ENGINE."""
    run: RunFigures | None
    """Over all samples of the step, by the run itself."""
    notes: Sequence[str] = ()

    def difference(self, a: str, b: str) -> Difference:
        """Of a to b."""
        return difference(self.scores[a], self.scores[b], self.tokens.trajectory)

    def differences(self) -> dict[str, Difference]:
        """Everybody to the engine, then everybody to the last of the rest, the most exact."""
        names = list(self.scores)
        rest = [name for name in names if name != ENGINE]
        pairs = [(name, ENGINE) for name in rest] + [(name, rest[-1]) for name in rest[:-1]]
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
    num = len(comparison.tokens.samples)
    lines = [
        f"step {comparison.step}: {comparison.origin}, version {comparison.version}; {num} samples, "
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
    names = [name for name in comparisons[0].scores if name != ENGINE]
    lines = [
        "mean absolute difference to the engine, in nats",
        f"{'step':>6}{'trainer (run)':>16}" + "".join(f"{name:>16}" for name in names),
    ]
    for c in comparisons:
        own = f"{c.run.mean:.3e}" if c.run is not None else "-"
        lines.append(f"{c.step:>6}{own:>16}" + "".join(f"{c.difference(name, ENGINE).mean:>16.3e}" for name in names))
    return "\n".join(lines)
