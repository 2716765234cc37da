from __future__ import annotations

import numpy as np
import pytest

from vime.errors import WeightSyncError
from vime.protocols import Completion, ProbeResult
from vime.weight_sync.verify import ProbeReport, ProbeTolerance, compare_probe, probe_sequences


def probe(*log_probs: tuple[float, ...]) -> ProbeResult:
    completions = tuple(
        Completion(token_ids=(5,) * len(lp), log_probs=lp, finish_reason="length", weight_versions=())
        for lp in log_probs
    )
    return ProbeResult(((1, 2),) * len(log_probs), completions)


def test_differences_are_over_the_generated_tokens_alone() -> None:
    # Prompt positions: NaN, and a score nobody compares. |(-1) - (-1.5)| = 0.5, |(-2) - (-2.25)| = 0.25: mean 0.375.
    report = compare_probe(probe((-1.0, -2.0)), [np.array([np.nan, -9.0, -1.5, -2.25])])
    assert (report.num_tokens, report.max, report.mean) == (2, 0.5, 0.375)
    assert report.worst == "prompt 0, token 0: engine -1.000000, trainer -1.500000"
    assert probe_sequences(probe((-1.0, -2.0))) == [(1, 2, 5, 5)]


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([], "scored 0 times"),
        ([np.array([np.nan, -1.0, -1.0])], "1 scores"),
        ([np.array([np.nan, -1.0, -1.0, np.nan])], "1 of them not finite"),
        ([np.array([np.nan, -1.0, -np.inf, -1.0])], "1 of them not finite"),
    ],
)
def test_missing_scores_are_never_agreement(
    scores: list[np.ndarray[tuple[int], np.dtype[np.float64]]], message: str
) -> None:
    with pytest.raises(WeightSyncError, match=message):
        compare_probe(probe((-1.0, -2.0)), scores)


def test_an_engine_that_answers_with_no_number_does_not_agree() -> None:
    with pytest.raises(WeightSyncError, match="probe 0: the engine's log-probs are not all finite"):
        compare_probe(probe((-1.0, float("nan"), -2.0)), [np.array([np.nan, -9.0, -1.0, -1.0, -2.0])])


def test_a_probe_without_tokens_verifies_nothing() -> None:
    with pytest.raises(WeightSyncError, match="no tokens"):
        compare_probe(probe(()), [np.array([np.nan, -1.0])])


@pytest.mark.parametrize(
    ("tolerance", "exceeded"),
    [
        (ProbeTolerance(0.5), False),  # the bound itself is allowed
        (ProbeTolerance(0.49), True),
        (ProbeTolerance(0.375, "mean"), False),
        (ProbeTolerance(0.37, "mean"), True),
    ],
)
def test_a_tolerance_bounds_the_largest_or_the_mean_difference(tolerance: ProbeTolerance, exceeded: bool) -> None:
    report = compare_probe(probe((-1.0, -2.0)), [np.array([np.nan, -9.0, -1.5, -2.25])])
    assert tolerance.exceeded(report) is exceeded


def test_a_difference_that_is_no_number_exceeds_every_tolerance() -> None:
    assert ProbeTolerance(1e9, "mean").exceeded(ProbeReport(1, float("nan"), float("nan"), ""))
