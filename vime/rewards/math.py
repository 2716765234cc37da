"""Mathematical answers: the content of the last \\boxed{} after any </think>, equal to the label as mathematics.

Equal spelling and plain numbers are decided here by string work; everything else needs a computer algebra system,
which model output can make run for ever, and is therefore done by `grade` in a worker process (vime/rewards/pool.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vime.rewards.extract import last_boxed
from vime.rewards.grade import CORRECT, UNPARSEABLE, WRONG, Grade
from vime.rewards.numbers import canonical_number

_MAX_SYMBOLIC_CHARS = 1000  # no answer worth comparing is longer, and parsing time grows with it
# Spelling that never changes the meaning, removed or unified before strings are compared.
_SPACING = re.compile(r"\\[,;:! ]|\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])|[\s~]+")
_FRACTION = re.compile(r"\\[dt]frac(?![A-Za-z])")
# The first three also before symbols are compared.
_SYNONYMS = (("°", "^\\circ"), ("\u2212", "-"), ("\\varnothing", "\\emptyset"), ("\\$", ""), ("{,}", ","))


def quick_grade(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade | None:
    """The grade where string work decides it, None where symbols must be compared. Time is linear in the response."""
    return quick_judge(last_boxed(response), label)


def grade(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """1 if the boxed answer equals the label, decided symbolically where spelling and numbers do not.

    May need any amount of time and memory, so call it through a `GraderPool`. A label that is a list holds
    alternatives, each of which is right. An answer that cannot be parsed as mathematics is wrong unless it is spelled
    like the label; a response without a complete box is unparseable.
    """
    return judge(last_boxed(response), label)


def prepare() -> None:
    """Load the algebra system ahead of the first answer, whose time limit should not pay for it."""
    from vime.rewards.symbolic import equal

    equal(r"\frac{1}{2}", "0.5")


def quick_judge(answer: str | None, label: Any) -> Grade | None:
    """The grade of an extracted answer by spelling and plain numbers; None if those do not decide it."""
    if answer is None or not answer.strip():
        return UNPARSEABLE
    decided = [_quick_equal(answer, wanted) for wanted in alternatives(label)]
    if True in decided:
        return CORRECT
    return None if None in decided else WRONG


def judge(answer: str | None, label: Any) -> Grade:
    """The grade of an extracted answer; None is unparseable. May need any amount of time and memory."""
    decided = quick_judge(answer, label)
    if decided is not None:
        return decided
    from vime.rewards.symbolic import equal  # heavy: sympy

    assert answer is not None  # quick_judge has looked
    undecided = [wanted for wanted in alternatives(label) if _quick_equal(answer, wanted) is None]
    return CORRECT if any(equal(_trim(wanted), _trim(answer)) for wanted in undecided) else WRONG


def alternatives(label: Any) -> list[str]:
    """The right answers that a label names: one, or each entry of a list."""
    return [str(entry) for entry in label] if isinstance(label, list | tuple) else [str(label)]


def _quick_equal(answer: str, wanted: str) -> bool | None:
    got, want = _simplify_spelling(answer), _simplify_spelling(wanted)
    if got == want:
        return True
    got_number, want_number = canonical_number(got), canonical_number(want)
    if got_number is not None and want_number is not None:
        return got_number == want_number
    return None if len(got) <= _MAX_SYMBOLIC_CHARS else False


def _trim(text: str) -> str:
    """Without the decoration that belongs to the sentence, not the answer: dollar signs, a full stop, a first "="."""
    for plain, latex in _SYNONYMS[:3]:
        text = text.replace(plain, latex)
    text = text.strip().strip("$").strip().removesuffix("\\\\").removeprefix("=").strip()
    return text[:-1].rstrip() if text.endswith(".") else text


def _simplify_spelling(text: str) -> str:
    text = _trim(text)
    for other, usual in _SYNONYMS:
        text = text.replace(other, usual)
    text = _SPACING.sub("", text)
    text = _FRACTION.sub(lambda _: "\\frac", text)
    inner = text.removeprefix("\\text{")
    return inner[:-1] if inner is not text and inner.endswith("}") and inner.count("{") == 0 else text
