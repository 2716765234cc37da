"""What a grader gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

Verdict: TypeAlias = Literal["correct", "wrong", "unparseable", "timeout", "crashed"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True, slots=True)
class Grade:
    """One response's score and how it came about.

    "unparseable" means that the response holds no answer; "timeout" and "crashed" that the grader failed on it.
    """

    score: float
    verdict: Verdict


CORRECT = Grade(1.0, "correct")
WRONG = Grade(0.0, "wrong")
UNPARSEABLE = Grade(0.0, "unparseable")
TIMEOUT = Grade(0.0, "timeout")
CRASHED = Grade(0.0, "crashed")

GradeFunction: TypeAlias = Callable[[str, Any, Mapping[str, Any]], Grade]
"""(response, label, metadata) -> Grade"""
QuickFunction: TypeAlias = Callable[[str, Any, Mapping[str, Any]], Grade | None]
"""The same, or None for a response that it cannot judge in microseconds and without risk."""
