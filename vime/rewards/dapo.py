"""DAPO's convention: the answer stands after the last "Answer:", and the score is +1 or -1 (arXiv:2503.14476).

The answer is compared as in `math`, not by spelling alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vime.rewards.extract import after_thinking, last_boxed
from vime.rewards.grade import Grade, Verdict
from vime.rewards.math import judge, prepare, quick_judge

# Markdown around the word ("**Answer:** 5") does not count; the answer may stand on the next line.
_ANSWER = re.compile(r"\banswer\**[^\S\n]*:[\s*]*([^\n]*)", re.IGNORECASE)
_DELIMITERS = (("\\(", "\\)"), ("\\[", "\\]"), ("$", "$"), ("`", "`"))


def quick_grade(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade | None:
    """The grade where string work decides it, None where symbols must be compared."""
    grade = quick_judge(stated_answer(response), label)
    return None if grade is None else _signed(grade)


def grade(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """+1 if the stated answer equals the label, else -1; the entry "acc" is 1 or 0. Without "Answer:" unparseable."""
    return _signed(judge(stated_answer(response), label))


def failure(verdict: Verdict) -> Grade:
    """The grade of a response on which the grader hung or crashed."""
    return _signed(Grade(0.0, verdict))


def stated_answer(response: str) -> str | None:
    """What follows the last "Answer:" of the line, without its delimiters; None if nothing does."""
    found = None
    for found in _ANSWER.finditer(after_thinking(response)):  # noqa: B007
        pass
    if found is None:
        return None
    text = found[1].strip().rstrip("*").strip()
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    for opening, closing in _DELIMITERS:
        bare = text.removesuffix(".").rstrip()
        if len(bare) > len(opening) + len(closing) and bare.startswith(opening) and bare.endswith(closing):
            return bare[len(opening) : -len(closing)].strip()
    return text


def _signed(grade: Grade) -> Grade:
    score = 2 * grade.score - 1
    return Grade(score, grade.verdict, {"score": score, "acc": grade.score})


__all__ = ["failure", "grade", "prepare", "quick_grade", "stated_answer"]
