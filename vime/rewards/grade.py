"""What a grader gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

Verdict: TypeAlias = Literal["correct", "wrong", "unparseable", "timeout", "crashed"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""From the best to the worst; a reward of several parts reports its worst."""


@dataclass(frozen=True, slots=True)
class Grade:
    """One response's score and how it came about.

    "unparseable" means that the response holds no answer; "timeout" and "crashed" that the grader failed on it.
    """

    score: float
    verdict: Verdict
    entries: Mapping[str, float] = field(default_factory=dict)
    """The numbers of the judgement where there are several, which --reward-key chooses from; empty for most."""


CORRECT = Grade(1.0, "correct")
WRONG = Grade(0.0, "wrong")
UNPARSEABLE = Grade(0.0, "unparseable")
TIMEOUT = Grade(0.0, "timeout")
CRASHED = Grade(0.0, "crashed")

GradeFunction: TypeAlias = Callable[[str, Any, Mapping[str, Any]], Grade]
"""(response, label, metadata) -> Grade"""
QuickFunction: TypeAlias = Callable[[str, Any, Mapping[str, Any]], Grade | None]
"""The same, or None for a response that it cannot judge in microseconds and without risk."""


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """One built-in reward, as `REWARDS` lists it."""

    grade: GradeFunction
    quick: QuickFunction | None = None
    """String work whose time is linear in the response and that needs no worker process; None sends the rest there."""
    needs_label: bool = True
    failure: Callable[[Verdict], Grade] = lambda verdict: Grade(0.0, verdict)
    """The grade of a response on which the grader hung or crashed: as of a wrong one, but for the verdict."""
    entries: tuple[str, ...] = ()
    """Names of `Grade.entries`, the one to train on first and the one to evaluate by last."""
