"""benchmarks/agreement/experiment.py: its problems, its flags, and what its committed runs show."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks.agreement import __main__ as agreement
from benchmarks.agreement import experiment, sums
from vime.cli.parse import Catalogue, parse

RUNS = Path(agreement.__file__).parents[1] / "results" / "r3_h200"


def test_solutions_end_in_the_sum_and_no_problem_is_held_out_and_trained_on(tmp_path: Path) -> None:
    paths = sums.write_problems(tmp_path, num_train=200, num_heldout=50)
    train, heldout = ([json.loads(line) for line in path.read_text().splitlines()] for path in paths)
    assert len(train) == 200 and len(heldout) == 50
    assert not {row["problem"] for row in train} & {row["problem"] for row in heldout}
    for row in train:
        partial = row["solution"].split(";")
        assert partial[-1] == row["sum"] == str(eval(row["problem"].rstrip("=")))
        assert len(partial) == len(row["problem"][1:-1].replace("-", "+").split("+")) - 1


@pytest.mark.parametrize(("response", "reward"), [("13;43", 1.0), ("43", 1.0), ("43;13", 0.0), ("13;43;", 0.0)])
def test_the_last_number_counts(response: str, reward: float) -> None:
    class Answer:
        label = "43"

    Answer.response = response  # type: ignore[attr-defined]
    assert asyncio.run(sums.last_number_reward(None, Answer())) == reward  # type: ignore[arg-type]


def test_the_flags_of_each_run_are_flags() -> None:
    for _, _, own in experiment.run_names([0, 1]):
        for flags in (experiment._WARM, experiment._GRPO):
            parsed = parse([*experiment._TRAINER.split(), *flags.split(), *own], Catalogue())
            assert not parsed.problems


def test_a_complete_run_is_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "with_0").mkdir()
    rows = [{"step": -1, "eval/heldout": 0.5}, *({"step": k, "train/step": k} for k in range(3))]
    (tmp_path / "with_0" / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 3, "tr')
    assert experiment.done(tmp_path / "with_0") == 3 and experiment.done(tmp_path / "with_1") == 0
    assert experiment.train("with_0", ["--no-such-flag"], tmp_path, "0", steps=3, limit_s=1.0)


def test_the_committed_runs_are_judged_as_the_docs_say(capsys: pytest.CaptureFixture[str]) -> None:
    def of(kind: str) -> list[str]:
        return [str(RUNS / f"{kind}_{seed}.jsonl") for seed in range(3)]

    words = ["--drift", *of("with"), "--without", *of("without"), "--with", *of("with"), "--dense", *of("dense")]
    assert agreement.main(words) == 0
    assert "with R3 / without: 0.725 (95 %: 0.692 to 0.760)" in capsys.readouterr().out
