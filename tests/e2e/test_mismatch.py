"""`vime mismatch` on what a run has left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vime.cli.main import main

pytestmark = pytest.mark.engine


def test_hf_agrees_with_the_engine_on_each_rollout_whose_weights_were_kept(
    finished: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = finished
    assert main(["mismatch", str(run), "--out", str(tmp_path), "--device", "cpu"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    # The start, and the checkpoint after rollout 1; the last one sampled nothing.
    assert [(step["step"], step["version"]) for step in report["steps"]] == [(0, 1), (2, 3)]
    assert any("after rollout 2" in note for note in report["not compared"])
    for step in report["steps"]:
        assert step["num_samples"] == 32
        assert step["differences"]["HF float32 - engine"]["mean"] < 1e-5
        assert step["differences"]["trainer - engine"]["mean"] == pytest.approx(
            step["trainer - engine, by the run"]["mean"], rel=0.2
        )
        assert {who: verdict["word"] for who, verdict in step["verdicts"].items()} == {
            "engine": "precision",
            "trainer": "precision",
        }
    assert (tmp_path / "step_000002.png").stat().st_size > 10_000
    assert "mean absolute difference to the engine" in capsys.readouterr().out


def test_a_step_whose_weights_were_not_kept_is_refused(
    finished: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mismatch", str(finished[0]), "--step", "1"]) == 2
    assert "version 2 sampled rollout 1, and weights are saved of 1, 3, 4" in capsys.readouterr().err


@pytest.mark.slow
def test_a_checkpoint_without_rollouts_is_sampled_from_and_an_engine_scores_them_anew(
    task: Path, tmp_path: Path
) -> None:
    assert main(["mismatch", str(task / "model"), "--engine", "--out", str(tmp_path), "--device", "cpu"]) == 0
    (step,) = json.loads((tmp_path / "report.json").read_text())["steps"]
    assert step["num_samples"] == 32 and step["differences"]["engine anew - engine"]["mean"] < 1e-5
    assert step["verdicts"]["engine"]["word"] == step["verdicts"]["trainer"]["word"] == "precision"


def test_what_is_neither_run_nor_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mismatch", str(tmp_path), "--max-samples", "-1", "--temperature", "0"]) == 2
    said = capsys.readouterr().err
    assert "neither a run's folder" in said and "--max-samples is -1" in said and "--temperature is 0.0" in said
