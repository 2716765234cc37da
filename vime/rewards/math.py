"""Mathematical answers: the content of the last \\boxed{} after any </think>, equal to the label as mathematics.

Equal spelling and plain numbers are decided here by string work; everything else needs a computer algebra system,
which model output can make run for ever, and is therefore done by `grade` in a worker process (vime/rewards/pool.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vime.rewards.grade import CORRECT, UNPARSEABLE, WRONG, Grade
from vime.rewards.numbers import canonical_number

_BOX = "\\boxed"
_THINK_END = "</think>"
_MAX_SYMBOLIC_CHARS = 1000  # no answer worth comparing is longer, and parsing time grows with it
# Spelling that never changes the meaning, removed or unified before strings are compared.
_SPACING = re.compile(r"\\[,;:! ]|\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])|[\s~]+")
_FRACTION = re.compile(r"\\[dt]frac(?![A-Za-z])")


def quick_grade(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade | None:
    """The grade where string work decides it, None where symbols must be compared. Time is linear in the response."""
    answer = last_boxed(response)
    if answer is None or not answer.strip():
        return UNPARSEABLE
    got, want = _simplify_spelling(answer), _simplify_spelling(str(label))
    if got == want:
        return CORRECT
    got_number, want_number = canonical_number(got), canonical_number(want)
    if got_number is not None and want_number is not None:
        return CORRECT if got_number == want_number else WRONG
    return None if len(got) <= _MAX_SYMBOLIC_CHARS else WRONG


def grade(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """1 if the boxed answer equals the label, decided symbolically where spelling and numbers do not.

    May need any amount of time and memory, so call it through a `GraderPool`. An answer that cannot be parsed as
    mathematics is wrong unless it is spelled like the label; a response without a complete box is unparseable.
    """
    decided = quick_grade(response, label, metadata)
    if decided is not None:
        return decided
    from vime.rewards.symbolic import equal  # heavy: sympy

    answer = last_boxed(response)
    assert answer is not None  # quick_grade has looked
    return CORRECT if equal(_trim(str(label)), _trim(answer)) else WRONG


def prepare() -> None:
    """Load the algebra system ahead of the first answer, whose time limit should not pay for it."""
    from vime.rewards.symbolic import equal

    equal(r"\frac{1}{2}", "0.5")


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{…} after the last </think>; None if there is none or its brace never closes."""
    start = text.rfind(_THINK_END)
    end = len(text)
    while (at := text.rfind(_BOX, max(start, 0), end)) >= 0:
        brace = at + len(_BOX)
        while brace < len(text) and text[brace].isspace():
            brace += 1
        if brace < len(text) and text[brace] == "{":
            return _braced(text, brace)
        end = at  # the bare word: look further up
    return None


def _braced(text: str, opening: int) -> str | None:
    depth, i = 0, opening
    while i < len(text):
        char = text[i]
        if char == "\\":
            i += 1  # \{ and \} are characters, not groups
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return text[opening + 1 : i]
        i += 1
    return None


def _trim(text: str) -> str:
    """Without the decoration that belongs to the sentence, not the answer: dollar signs around it, a full stop."""
    text = text.strip().strip("$").strip()
    return text[:-1].rstrip() if text.endswith(".") else text


def _simplify_spelling(text: str) -> str:
    text = _SPACING.sub("", _trim(text).replace("\\$", "").replace("{,}", ","))
    text = _FRACTION.sub(lambda _: "\\frac", text)
    inner = text.removeprefix("\\text{")
    return inner[:-1] if inner is not text and inner.endswith("}") and inner.count("{") == 0 else text
