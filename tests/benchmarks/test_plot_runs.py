"""benchmarks/plot_runs.py: what it reads of runs, and that the pictures in docs/ are those of its list."""

from __future__ import annotations

import json

import pytest

from benchmarks import plot_runs

RECORDS = [
    {"step": 1, "rollout/raw_reward": 0.5, plot_runs.DIFFERENCE: 0.02, "perf/step_time": 9.0, "eval/a": 0.75},
    {"step": -1, "eval/a": 0.25, "eval/b": 0.75, "eval/a/response_len": 7.0},
    {"step": 0, "rollout/raw_reward": 0.25, plot_runs.DIFFERENCE: 0.01, "perf/step_time": 2.0}
    | {"perf/step_time_without_eval_and_save": 1.5},
]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_three_panels_hold_the_figures_of_the_run(tmp_path):
    run = plot_runs.read_run(write(tmp_path / "run.jsonl", RECORDS))
    figure = plot_runs.draw({"a run": run}, tmp_path / "new" / "picture.svg")
    lines = [[(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines] for axes in figure.axes]
    assert lines[0] == [([1, 2], [0.25, 0.5]), ([0, 2], [0.5, 0.75])]
    assert lines[1] == [([1, 2], [0.01, 0.02])]
    assert lines[2] == [([1, 2], [1.5, 9.0])]
    assert "time of a step" in (tmp_path / "new" / "picture.svg").read_text()


def test_the_same_runs_give_the_same_file(tmp_path):
    for name in ("a.svg", "b.svg"):
        plot_runs.draw({"one": RECORDS, "other": RECORDS}, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(
    ("line", "problem"), [("{", "line 1, is no record"), ('{"loss": 1}', "line 1"), ("", "no step")]
)
def test_a_file_that_is_no_run_is_named(line, problem, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(line)
    with pytest.raises(SystemExit, match=problem):
        plot_runs.read_run(path)


def test_runs_are_given_on_the_command_line_as_labels_and_files(tmp_path, capsys):
    path = write(tmp_path / "run.jsonl", RECORDS)
    assert plot_runs.main(["--out", str(tmp_path / "p.svg"), f"mine={path}"]) == 0
    assert (tmp_path / "p.svg").is_file()
    for words in (["--out", str(tmp_path / "q.svg"), str(path)], ["--out", "q.svg"], ["no_such_figure"]):
        with pytest.raises(SystemExit):
            plot_runs.main(words)
    assert "there are chain_sum" in capsys.readouterr().err


def test_every_picture_of_the_list_is_in_docs_and_drawn_from_files_that_are_there():
    for name, runs in plot_runs.figures().items():
        text = (plot_runs.PICTURES / f"{name}.svg").read_text()
        assert f"images/{name}.svg" in (plot_runs.PICTURES.parent / "results.md").read_text()
        for label, file in runs.items():
            assert label in text
            assert plot_runs.read_run(plot_runs.HERE / file)
