"""The graders on spellings of their own; the shared cases are in tests/golden."""

from __future__ import annotations

import time
from typing import Any

import pytest

from vime.rewards import REWARDS
from vime.rewards.extract import last_boxed
from vime.rewards.numbers import canonical_number


@pytest.mark.parametrize(
    ("response", "label", "verdict"),
    [
        ("42", "42", "correct"),
        (" 42\n", 42, "correct"),
        ("42.0", "42", "wrong"),
        ("", "42", "unparseable"),
        ("  ", "", "unparseable"),
    ],
)
def test_exact_match(response: str, label: Any, verdict: str) -> None:
    assert REWARDS["exact_match"].grade(response, label, {}).verdict == verdict


@pytest.mark.parametrize(
    ("response", "label", "verdict"),
    [
        ("#### 18", "so 9+9=18\n#### 18", "correct"),
        ("####18.00", 18, "correct"),
        ("#### $1,000.", "1000", "correct"),
        ("#### -$5", "-5", "correct"),
        ("#### 5 apples", "5", "correct"),
        ("#### 4 #### 5", "4", "wrong"),
        ("#### x", "5", "unparseable"),
        ("5", "5", "unparseable"),
        ("#### \u0665", "5", "unparseable"),
        ("#### 1,2", "12", "unparseable"),
    ],
)
def test_gsm8k(response: str, label: Any, verdict: str) -> None:
    assert REWARDS["gsm8k"].grade(response, label, {}).verdict == verdict


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed {3}", "3"),
        (r"\boxed{\boxed{4}}", "4"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{1} and \boxed", "1"),
        (r"\boxed{1} and \boxed{", None),
        (r"\boxed{1}</think>", None),
        (r"<think>\boxed{1}", "1"),
        ("", None),
    ],
)
def test_last_boxed(text: str, box: str | None) -> None:
    assert last_boxed(text) == box


def test_finding_the_box_takes_linear_time() -> None:
    started = time.thread_time()  # what others do on the machine is not counted
    for text in ("\\boxed" * 200_000, "\\boxed{" * 100_000, "{" * 1_000_000, "</think>" * 100_000):
        last_boxed(text)
    assert time.thread_time() - started < 20, "the square of these lengths takes hours"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0012.500", "12.5"),
        ("+3", "3"),
        ("-0.0", "0"),
        (".5", "0.5"),
        ("5.", "5"),
        ("1,234,567", "1234567"),
        ("1,23", None),
        ("1e5", None),
        (".", None),
        ("", None),
        ("-", None),
        ("\uff14", None),
    ],
)
def test_canonical_number(text: str, number: str | None) -> None:
    assert canonical_number(text) == number
