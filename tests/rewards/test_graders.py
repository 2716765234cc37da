"""The graders on the shared cases, and on spellings of their own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vime.rewards import REWARDS
from vime.rewards.extract import last_boxed
from vime.rewards.numbers import canonical_number
from vime.rewards.pool import GraderPool

CASES = json.loads((Path(__file__).parents[1] / "golden/cases/grading.json").read_text())["cases"]
GRADER = {"boxed": "math", "gsm8k": "gsm8k"}


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    """With time for everything that ends, however busy the machine is."""
    pool = GraderPool(num_workers=1, timeout_s=120.0)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def impatient_pool() -> Iterator[GraderPool]:
    """Gives up after less than the five seconds that responses made to hang a grader may cost."""
    pool = GraderPool(num_workers=1, timeout_s=4.5)
    yield pool
    pool.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_shared_case(
    case: dict[str, Any],
    pool: GraderPool,
    impatient_pool: GraderPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    # What is right must be found right; a response that is wrong and made to take for ever may be given up.
    may_be_given_up = case["expected"] is False and case.get("max_seconds")
    chosen = impatient_pool if may_be_given_up else pool
    assert not may_be_given_up or chosen.timeout_s <= case["max_seconds"]
    grade = asyncio.run(chosen.grade(GRADER[case["style"]], case["response"], case["label"], {}))
    if case["expected"] == "unparseable":
        assert grade.verdict == "unparseable"
    else:
        assert (grade.verdict == "correct") is case["expected"], case["why"]
    assert grade.score == (1.0 if case["expected"] is True else 0.0)
    if path := case.get("forbid_path"):
        assert not Path(path).exists()
        assert not (Path("/") / path).exists()


@pytest.mark.parametrize("case", [c for c in CASES if c["level"] != "robust"], ids=lambda case: case["id"])
def test_what_string_work_decides_is_what_symbols_decide(case: dict[str, Any]) -> None:
    name = GRADER[case["style"]]
    spec = REWARDS[name]
    assert spec.quick is not None
    quick = spec.quick(case["response"], case["label"], {})
    assert quick is None or quick == spec.grade(case["response"], case["label"], {})


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
