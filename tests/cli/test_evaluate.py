"""`vime eval` is train.py with --num-rollout 0."""

from collections.abc import Sequence

import pytest

from vime.cli import launch
from vime.cli.main import main


def test_it_evaluates_whatever_number_of_rollouts_a_file_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[Sequence[str]] = []
    monkeypatch.setattr(launch, "main", lambda argv: given.append(argv) or 7)
    assert main(["eval", "--config", "run.yaml", "--num-rollout", "9"]) == 7
    assert given == [["--config", "run.yaml", "--num-rollout", "9", "--num-rollout", "0"]]
    assert main(["eval", "--help"]) == 0
    assert "usage: vime eval" in capsys.readouterr().out
    assert main(["eval"]) == 2
