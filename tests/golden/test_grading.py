"""The graders on the shared cases."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.golden.loader import GRADER, grading_cases
from vime.rewards import REWARDS
from vime.rewards.pool import GraderPool


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


@pytest.mark.parametrize("case", grading_cases(), ids=lambda case: case["id"])
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


@pytest.mark.parametrize("case", [c for c in grading_cases() if c["level"] != "robust"], ids=lambda case: case["id"])
def test_what_string_work_decides_is_what_symbols_decide(case: dict[str, Any]) -> None:
    name = GRADER[case["style"]]
    spec = REWARDS[name]
    assert spec.quick is not None
    quick = spec.quick(case["response"], case["label"], {})
    assert quick is None or quick == spec.grade(case["response"], case["label"], {})
