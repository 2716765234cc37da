"""docs/algorithms.md says what benchmarks/results/algorithms_cpu.json holds."""

from __future__ import annotations

import json

import pytest

from benchmarks.algorithms import page, report, settings

RESULTS = json.loads(page.RESULTS.read_text("utf-8"))


def test_the_committed_section_is_the_generated_one() -> None:
    text = page.PAGE.read_text("utf-8")
    assert text == page.filled(text, RESULTS), "run `python -m benchmarks.algorithms.page`"
    assert page.PLOT.is_file()


def test_what_was_measured_has_learned() -> None:
    runs = [report.as_run(entry) for entry in RESULTS["runs"]]
    names = [name for name in settings.rows(with_variants=True) if any(run.row == name for run in runs)]
    assert {run.row for run in runs} == set(names), "a row that is no more"
    assert report.failures(names, runs, 1, settings.MIN_GAIN[True]) == []


def test_the_section_has_the_machine_the_table_and_the_plot() -> None:
    entry = {
        **{"row": "grpo", "seed": 0, "seconds": 9.0, "step_seconds": 1.0, "curve": [[0, 0.4], [8, 0.6]]},
        **{"explained_variance": [], "load_average": 2.5},
    }
    about = {"note": "busy", "cores": 2, "cpu": "a CPU", "versions": {"torch": "2"}, "commit": "abc", "lanes": 2}
    text = page.section({**about, "runs": [entry, {**entry, "seed": 1, "load_average": 3.5}]})
    text = text.replace("\n", " ")
    for part in ("2 runs of 8 rollouts", "busy.", "2.5 to 3.5", "torch 2", "| grpo | 2 | 0.400 | 0.600 |", "](images/"):
        assert part in text
    with pytest.raises(ValueError):
        page.filled("a page without the place", {**about, "runs": [entry]})
