"""The matrix goes on whatever a case does; a row without a result is a failure. Programs stand in for the ranks."""

import sys

import pytest

from tests.trainer.megatron import run_matrix
from tests.trainer.megatron.layout_case import Case
from tests.trainer.megatron.rank_processes import Outcome, Ranks

# A rank that does what the case says.
STAND_IN = """
import pickle, sys, time
from pathlib import Path
from tests.trainer.megatron.rank_processes import result_file

rank, size, folder, cases, _, _ = sys.argv[1:]
for case in pickle.loads((Path(folder) / cases).read_bytes()):
    what = case.split()[1] if rank == "1" else "fine"
    if "hangs" in case:
        (Path(folder) / f"hangs {rank}").touch()
        time.sleep(3600)
    if what == "dies":
        sys.exit("killed by nobody")
    result = {"failed": "Traceback\\nValueError: no such thing"} if what == "fails" else {"rank": int(rank)}
    part = result_file(Path(folder), case, int(size), int(rank)).with_suffix(".part")
    part.write_bytes(pickle.dumps(result))
    part.rename(part.with_suffix(".pkl"))
    if "failed" in result:
        break
"""


@pytest.fixture
def run(tmp_path):
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)

    looks = []

    def clock():
        """Stands still, so that no limit depends on this machine, until all ranks hang; then the limit is over."""
        if all((tmp_path / f"hangs {rank}").exists() for rank in (0, 1)):
            looks.append(1)
        # Not at the first look: results that lay there before the ranks hung are seen once more.
        return 1e6 * (len(looks) > 5)

    def outcomes(*what):
        cases = [f"{k} {word}" for k, word in enumerate(what)]
        ranks = Ranks(tmp_path, 2, cases, worker=(sys.executable, str(script)), clock=clock)
        return [outcome for _, outcome in ranks.outcomes()]

    return outcomes


def test_each_case_gives_what_its_ranks_found(run):
    assert [o.ranks for o in run("fine", "fine")] == [[{"rank": 0}, {"rank": 1}]] * 2


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("hangs", "gave nothing in 300 s"),
        ("dies", "rank 1 ended with 1: killed by nobody"),
        ("fails", "rank 1: ValueError: no such thing"),
    ],
)
def test_what_goes_wrong_is_that_cases_result_and_the_others_go_on(run, what, reason):
    before, bad, after = run("fine", what, "fine")
    assert reason in bad.failure and not bad.ranks
    assert before.ranks and after.ranks and not before.failure and not after.failure


def test_rows_without_a_result_or_a_reference_are_failures(monkeypatch, capsys, tmp_path):
    cases = [Case("DP2", "qwen3"), Case("PP2", "llama"), Case("CP2", "qwen3")]
    outcomes = {
        "DP2 qwen3": Outcome([{}, {}]),
        "one process qwen3": Outcome(failure="out of memory"),
        "PP2 llama": Outcome(failure="rank 1 hung"),
    }
    monkeypatch.setattr(run_matrix, "MATRIX", cases)
    monkeypatch.setattr(run_matrix, "run_cases", lambda folder, cases, **how: outcomes)
    assert run_matrix.main([]) == 1
    printed = capsys.readouterr().out
    assert "0 of 3 rows within their bounds" in printed
    for text in ("one process: out of memory", "ranks: rank 1 hung", "CP2 qwen3:\n  ranks: was not run"):
        assert text in printed
    assert run_matrix.main(["--only", "no such case"]) == 1, "no row is no proof"
    assert "CP2 DP2 PP2 llama qwen3" in capsys.readouterr().err, "which words there are"
