"""`vime buffer` on journals of runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from tests.data.groups import finished, pending
from vime.cli.main import main
from vime.data.journal import Journal


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder, with the journal beside its checkpoints."""
    folder, save = tmp_path / "run", tmp_path / "ckpt"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({"settings": {"checkpoint": {"save": str(save)}}}))
    journal = Journal(save / "journal.sqlite")
    journal.set_meta(epoch_size=4, mixed=False, first_group_id=0)
    journal.taken([pending(i) for i in range(3)], 5)
    journal.finished(finished(0, version=6))
    journal.dropped([pending(1)], "filter: zero_std_1.0")
    journal.trained(5, [pending(0)])
    journal.saved(5, 7, journal.sync())
    return folder


def test_the_state_is_shown_for_a_run_its_checkpoints_and_the_file(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = run.parent / "ckpt"
    shown = []
    for place in (run, save, save / "journal.sqlite"):
        assert main(["buffer", str(place)]) == 0
        shown.append(capsys.readouterr().out)
    assert "3 groups" in shown[0] and "filter: zero_std_1.0" in shown[0]
    assert "oldest in flight: group 2 (prompt 2 of epoch 0), taken, taken for rollout 5" in shown[0]
    assert "last checkpoint: rollout 5, policy version 7" in shown[0]
    assert [line for line in shown[1].splitlines() if "ago" not in line] == [
        line for line in shown[2].splitlines() if "ago" not in line
    ]


def test_a_check_exits_with_1_if_a_prompt_is_amiss(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["buffer", str(run), "--check"]) == 0
    assert "check: 0 lost, 0 doubled; every prompt is accounted for" in capsys.readouterr().out
    Journal(run.parent / "ckpt" / "journal.sqlite").trained(6, [pending(0)])
    assert main(["buffer", str(run), "--check"]) == 1
    said = capsys.readouterr().out
    assert "DOUBLED  group 0 trained on in rollouts 5 and 6" in said and "check: 0 lost, 1 doubled" in said


def test_a_life_is_told_by_group_and_by_prompt(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["buffer", str(run), "--group", "0"]) == 0
    said = capsys.readouterr().out
    assert "group 0 (prompt 0 of epoch 0): trained" in said
    steps = [line.split("  ")[-1] for line in said.splitlines()[1:]]
    assert steps == ["taken", "generated: 2 samples, 6 tokens, version 6", "rewarded", "trained in rollout 5"]
    assert main(["buffer", str(run), "--prompt", "1"]) == 0
    assert "group 1 (prompt 1 of epoch 0): dropped, filter: zero_std_1.0" in capsys.readouterr().out
    assert main(["buffer", str(run), "--prompt", "77"]) == 1


@pytest.mark.parametrize("original_is_there", [True, False])
def test_a_copied_run_folder_has_its_own_journal(
    run: Path, capsys: pytest.CaptureFixture[str], original_is_there: bool
) -> None:
    there = run / "checkpoints"
    settings = {"settings": {"checkpoint": {"save": str(there)}, "log": {"run_dir": str(run)}}}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    (run.parent / "ckpt").rename(there)
    copy = Path(shutil.copytree(run, run.parent / "copy"))
    if not original_is_there:
        shutil.rmtree(run)
    assert main(["buffer", str(copy)]) == 0
    assert str(copy / "checkpoints" / "journal.sqlite") in capsys.readouterr().out


def test_a_folder_without_a_journal_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["buffer", str(tmp_path)]) == 2
    assert f"{tmp_path}: no journal there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"settings: [", "config.yaml is not YAML"),
        (b"\xff\xfe", "config.yaml is not YAML"),
        (b"settings: null", "no journal there"),
        (b"settings: {checkpoint: [1]}", "no journal there"),
        (b"settings: {checkpoint: {save: 5}}", "no journal there"),
    ],
)
def test_settings_that_are_no_runs_are_said_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes, said: str
) -> None:
    (tmp_path / "config.yaml").write_bytes(text)
    assert main(["buffer", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("number", ["-1", str(2**63), "x"])
def test_a_number_that_no_group_has_is_refused(run: Path, number: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["buffer", str(run), "--group", number])
