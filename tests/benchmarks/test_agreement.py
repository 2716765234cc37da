"""benchmarks/agreement: its verdict on rows and on runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.agreement import __main__ as agreement
from benchmarks.agreement.runs import METRIC, drift, ratio, ratio_of_runs, read_differences

ROW = agreement.Row("dense", "float32", 100, 0, 1e-6, 2e-6, 3e-6, 1e-6, 1e-5)


def write_run(folder: Path, values: list[float]) -> Path:
    folder.mkdir()
    rows = [{"step": k, "train/step": k, METRIC: v} for k, v in enumerate(values)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, [{"step": -1, "eval/x": 1.0}, *rows])) + "\n")
    return folder


def test_a_row_is_judged_by_its_largest_difference() -> None:
    assert ROW.is_within
    for name in ("trainer_engine", "hf_engine", "hf_trainer"):
        assert not replace(ROW, **{name: 1.1e-5}).is_within
        assert not replace(ROW, **{name: float("nan")}).is_within
    assert not replace(ROW, is_exact=True).is_within and replace(ROW, is_exact=True, trainer_engine=0.0).is_within
    assert "ABOVE" in agreement.table([replace(ROW, trainer_engine=1.0)])


@pytest.mark.parametrize(("bad", "code"), [("none", 0), ("dense", 1), ("experts, with R3", 1)])
def test_a_row_that_failed_is_an_exit_code(
    bad: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(name: str, samples: list[Path], _: object, folder: Path, *__: object) -> agreement.Row:
        assert samples == [folder]
        return replace(ROW, name=name, trainer_engine=1.0 if name == bad else 0.0)

    monkeypatch.setattr(agreement, "measure", measure)
    monkeypatch.setattr(agreement, "make_models", lambda *_: None)
    monkeypatch.setattr(agreement, "sampled", lambda _, __, folder: [folder])
    assert agreement.main(["--cpu", "--out", str(tmp_path / "rows.json")]) == code
    assert [row["name"] for row in json.loads((tmp_path / "rows.json").read_text())] == list(agreement.ROWS)


def test_a_row_that_cannot_be_made_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sampled(_: str, __: object, folder: Path) -> list[str]:
        if folder.name == "3":
            raise RuntimeError("the engine ended")
        return []

    monkeypatch.setattr(agreement, "make_models", lambda *_: None)
    monkeypatch.setattr(agreement, "measure", lambda name, *_: replace(ROW, name=name))
    monkeypatch.setattr(agreement, "sampled", sampled)
    assert agreement.main(["--cpu", "--at-a-time", "1"]) == 1
    said = capsys.readouterr()
    assert "the engine ended" in said.err and said.out.count("| within |") == len(agreement.ROWS) - 1


def test_the_rise_of_a_run_is_that_of_its_line() -> None:
    found = drift([1.0, 1.1, 1.2, 1.3, 1.4])
    assert found.mean == pytest.approx(1.2) and found.rise == pytest.approx(0.4) and found.error < 1e-9
    assert not found.is_small and drift([1.0, 1.02, 1.04]).is_small and drift([2.0, 1.0, 0.5]).is_small
    assert drift([1.0, 1.2, 0.9, 1.1]).error > 0.05
    with pytest.raises(ValueError, match="3 steps"):
        drift([1.0, 2.0])


def test_a_ratio_has_the_interval_of_its_seeds() -> None:
    found = ratio([0.7, 0.72, 0.68], [1.0, 1.0, 1.0])
    assert found.value == pytest.approx(0.7, abs=0.001) and found.low < 0.68 and 0.72 < found.high < 0.8
    assert found.is_lower
    assert not ratio([0.5, 1.1], [1.0, 1.0]).is_lower  # two seeds that say different things
    with pytest.raises(ValueError, match="2 to 10"):
        ratio([1.0], [1.0])


def test_a_pair_of_runs_alone_has_the_interval_of_its_blocks() -> None:
    before = [1.0 + k % 7 / 10 for k in range(60)]
    found = ratio_of_runs([[0.7 * v for v in before]], [before])
    assert found.value == pytest.approx(0.7) and found.high - found.low < 1e-9
    half = ratio_of_runs([[(0.4 if k < 30 else 1.2) * v for k, v in enumerate(before)]], [before])
    assert half.low < 0.6 and half.high > 1.0 and not half.is_lower
    assert ratio_of_runs([[0.7], [0.6]], [[1.0], [1.0]]) == ratio([0.7, 0.6], [1.0, 1.0])
    with pytest.raises(ValueError, match="20 steps"):
        ratio_of_runs([[1.0] * 19], [[1.0] * 25])


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [1.0, 2.0, 9.0])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "train/st\n' + json.dumps({"step": 2, "train/step": 2, METRIC: 3.0}) + "\n")
    assert read_differences(run) == [1.0, 2.0, 3.0]


def test_runs_are_judged_from_their_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat, rising = write_run(tmp_path / "flat", [1.0, 1.1, 0.9, 1.0]), write_run(tmp_path / "rising", [1.0, 2.0, 3.0])
    assert read_differences(flat) == [1.0, 1.1, 0.9, 1.0]
    assert agreement.main(["--drift", str(flat)]) == 0 and agreement.main(["--drift", str(rising)]) == 1
    without = [write_run(tmp_path / f"without{k}", [1.0, 1.1, 0.9 + k / 100]) for k in range(2)]
    lower = [write_run(tmp_path / f"with{k}", [0.7, 0.71, 0.69 + k / 100]) for k in range(2)]
    words = ["--without", *map(str, without), "--with", *map(str, lower)]
    swapped = ["--without", *map(str, lower), "--with", *map(str, without)]
    assert agreement.main(words) == 0 and agreement.main(swapped) == 1
    assert "with R3 / without: 0.7" in capsys.readouterr().out
    assert agreement.main([*words, "--dense", str(flat)]) == 0
    assert "with R3 / dense: 0.70" in capsys.readouterr().out
