"""Where a response says its answer. All of it takes time linear in the text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.rewards.grade import UNPARSEABLE, Grade, GradeFunction

_BOX = "\\boxed"
_THINK_END = "</think>"


def after_thinking(text: str) -> str:
    """What follows the last </think>; the whole text if there is none."""
    return text.rpartition(_THINK_END)[2]


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{…} after the last </think>; None if there is none or its brace never closes."""
    text = after_thinking(text)
    end = len(text)
    while (at := text.rfind(_BOX, 0, end)) >= 0:
        brace = at + len(_BOX)
        while brace < len(text) and text[brace].isspace():
            brace += 1
        if brace < len(text) and text[brace] == "{":
            return _braced(text, brace)
        end = at  # the bare word: look further up
    return None


def boxed(grade: GradeFunction) -> GradeFunction:
    """The same grader on the content of the last box alone; a response without one is unparseable."""

    def grade_box(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
        answer = last_boxed(response)
        return UNPARSEABLE if answer is None or not answer.strip() else grade(answer, label, metadata)

    return grade_box


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
