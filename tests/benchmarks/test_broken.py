"""benchmarks/agreement/broken.py: its flags, its verdict, and what its committed runs show."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agreement import broken, broken_engine
from vime.cli.parse import Catalogue, parse

ROOT = Path(broken.__file__).resolve().parents[2]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_flags_of_its_runs_are_flags(device: str) -> None:
    assert not parse([*broken._FLAGS.split(), *broken._DEVICE_FLAGS[device].split()], Catalogue()).problems


def test_every_prompt_is_of_several_blocks_and_another(tmp_path: Path) -> None:
    broken.write_prompts(tmp_path / "prompts.jsonl")
    prompts = {json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()}
    assert len(prompts) == 32
    assert min(map(len, prompts)) > 3 * 32  # bytes, of which the tiny model has one a token


@pytest.mark.parametrize(("response", "reward"), [("banana", 0.5), ("xyz", 0.0), ("", 0.0)])
def test_the_reward_is_the_share_of_vowels(response: str, reward: float) -> None:
    class Answer: ...

    Answer.response = response  # type: ignore[attr-defined]
    assert asyncio.run(broken.share_of_vowels(None, Answer())) == reward  # type: ignore[arg-type]


@pytest.mark.parametrize(("wrong", "code"), [("none", 0), ("late", 1), ("healthy", 1)])
def test_a_run_that_is_misjudged_is_an_exit_code(
    wrong: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def judged(name: str, *_: object) -> dict[str, Any] | None:
        word = "bug" if name == wrong else broken.VERDICTS[name]
        return {"verdicts": {"engine": {"word": word, "sentence": "so it is"}}}

    monkeypatch.setattr(broken, "judged", judged)
    monkeypatch.setattr(sys, "argv", ["broken", "--cpu", "--model", str(tmp_path), "--out", str(tmp_path / "out")])
    assert broken.main() == code
    rows = json.loads((tmp_path / "out" / "broken.json").read_text())
    assert [row["run"] for row in rows] == list(broken.VERDICTS)
    assert [row["run"] for row in rows if row["word"] != row["wanted"]] == ([] if wrong == "none" else [wrong])


def test_what_is_wrong_is_one_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(broken_engine.BREAK_VARIABLE, "everything")
    with pytest.raises(SystemExit, match="is 'everything'; give raw, late or cache"):
        broken_engine.main()


@pytest.mark.slow
@pytest.mark.engine
def test_each_broken_setup_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.agreement.broken", "--cpu", "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
