"""`vime doctor` says what is there, too."""

import sys

import pytest

from vime.cli.main import main


def test_it_says_versions_and_free_space_and_whether_something_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--platform", "cpu"])
    text = capsys.readouterr().out
    assert f"Python {sys.version.split()[0]}" in text
    assert "megatron-core 0.16.1" in text and "ray " in text
    assert "GiB memory free" in text
    assert ("nothing is missing" in text) == (code == 0)
