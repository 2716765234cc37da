"""benchmarks/algorithms: its rows are the estimators there are, its flags are accepted, its verdict misses nothing."""

import json

import pytest

from benchmarks.algorithms import report
from benchmarks.algorithms.settings import flags_of, rows
from vime.cli.parse import Catalogue, parse
from vime.config.estimators import ESTIMATORS


def test_every_estimator_is_a_row():
    assert list(rows(with_variants=False)) == list(ESTIMATORS)
    assert set(ESTIMATORS) < set(rows(with_variants=True))


@pytest.mark.parametrize("name", rows(with_variants=True))
def test_the_flags_of_each_row_are_flags(name):
    parsed = parse(flags_of(rows(with_variants=True)[name]), Catalogue())
    assert not parsed.problems and "vime.train.num_steps_per_rollout" in parsed.given


def write_run(folder, *accuracies):
    rows = [{"step": 10 * k - 1, "eval/heldout": a} for k, a in enumerate(accuracies)]
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in [*rows, {"step": 99}]) + "\n")
    return report.read_run("grpo", 0, folder, 12.0)


def test_a_run_is_read_from_its_metrics(tmp_path):
    run = write_run(tmp_path, 0.3, 0.82, 0.9)
    assert (run.before, run.after, run.steps_to_goal) == (0.3, 0.9, 10)
    with pytest.raises(ValueError, match="1 evaluations"):
        write_run(tmp_path, 0.3)


def test_the_verdict_names_what_is_missing_and_what_did_not_learn(tmp_path):
    good, flat = write_run(tmp_path, 0.3, 0.9), write_run(tmp_path, 0.3, 0.31)
    assert report.failures(["grpo"], [good], 1, 0.25) == []
    assert report.failures(["grpo", "rloo"], [good], 1, 0.25) == ["rloo: 0 of 1 runs ended"]
    (found,) = report.failures(["grpo"], [flat], 1, 0.25)
    assert found.startswith("grpo: accuracy 0.300 -> 0.310 with seed 0")
    (found,) = report.failures(["grpo"], [write_run(tmp_path, 0.3, float("nan"))], 1, 0.25)
    assert "nan" in found


def test_the_table_has_a_line_for_each_row(tmp_path):
    lines = report.table(["grpo", "rloo"], [write_run(tmp_path, 0.3, 0.9)]).splitlines()
    assert lines[2:] == ["| grpo | 1 | 0.300 | 0.900 | 10 (1 of 1) | 12 |", "| rloo | 0 | | | | |"]
