"""The probe: what an engine says of its own tokens must be what the trainer says of them, under the same weights.

Checksums and names prove what arrived. Only this proves what the engine computes with: a tensor loaded into the wrong
place, a stale prefix cache or a broken reload show here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from vime.errors import WeightSyncError
from vime.protocols import ProbeResult

PROBE_TOKENS = 64  # greedy tokens per prompt


@dataclass(frozen=True, slots=True)
class ProbeTolerance:
    """How far engine and trainer may be apart after a right weight sync: rounding, amplified by depth."""

    bound: float
    """Nats."""
    statistic: Literal["max", "mean"] = "max"
    """Of the differences over all probed tokens."""

    def value(self, report: ProbeReport) -> float:
        """What of the report is bounded."""
        return report.max if self.statistic == "max" else report.mean

    def exceeded(self, report: ProbeReport) -> bool:
        """Whether the report shows more than rounding; a NaN counts."""
        return not self.value(report) <= self.bound


# In bf16 a single token may differ by 1 nat and more between two right computations (seen up to 1.4 with SmolLM2-135M),
# while the mean stays near 0.02; wrong weights move the mean of greedy tokens by far more than 0.1.
DEFAULT_TOLERANCE = {"float32": ProbeTolerance(1e-4), "bfloat16": ProbeTolerance(0.1, "mean")}


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """How far engine and trainer are apart over all probed tokens; natural-log units."""

    num_tokens: int
    mean: float
    max: float
    worst: str
    """Where the largest difference is: prompt, token, both log-probs."""


def probe_sequences(probe: ProbeResult) -> list[tuple[int, ...]]:
    """Prompt and continuation of each probe, for the trainer to score."""
    return [
        (*prompt, *completion.token_ids) for prompt, completion in zip(probe.prompts, probe.completions, strict=True)
    ]


def compare_probe(probe: ProbeResult, scores: Sequence[npt.NDArray[np.floating]]) -> ProbeReport:
    """Compare the engine's log-probs with the trainer's.

    Args:
        probe: what the engine generated.
        scores: for each of `probe_sequences`, [tokens] log-probs at temperature 1; NaN for the first.
    Raises: WeightSyncError if nothing was generated, or a compared score is missing or not finite.
    """
    if len(scores) != len(probe.prompts):
        raise WeightSyncError(f"{len(probe.prompts)} probes were scored {len(scores)} times")
    differences: list[float] = []
    largest, worst = -1.0, ""
    for number, (prompt, completion, score) in enumerate(zip(probe.prompts, probe.completions, scores, strict=True)):
        theirs, engines = np.asarray(score, dtype=np.float64)[len(prompt) :], np.asarray(completion.log_probs)
        if theirs.shape != (len(completion.token_ids),) or not np.isfinite(theirs).all():
            raise WeightSyncError(
                f"probe {number}: {len(completion.token_ids)} generated tokens, {theirs.shape[0]} scores, "
                f"{int((~np.isfinite(theirs)).sum())} of them not finite"
            )
        if not np.isfinite(engines).all():  # no comparison below would notice
            raise WeightSyncError(f"probe {number}: the engine's log-probs are not all finite: {completion.log_probs}")
        for token, (ours, other) in enumerate(zip(completion.log_probs, theirs, strict=True)):
            difference = abs(ours - float(other))
            if difference > largest:
                largest = difference
                worst = f"prompt {number}, token {token}: engine {ours:.6f}, trainer {float(other):.6f}"
            differences.append(difference)
    if not differences:
        raise WeightSyncError("the probe generated no tokens, so it verified nothing")
    return ProbeReport(len(differences), float(np.mean(differences)), largest, worst)
