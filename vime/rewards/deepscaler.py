"""DeepScaleR's convention: reasoning first, then the answer in a box; a box inside the reasoning does not count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.rewards.extract import last_boxed
from vime.rewards.grade import Grade
from vime.rewards.math import alternatives, judge, prepare, quick_judge

_ENDS_OF_REASONING = ("</think>", "###Response")


def quick_grade(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade | None:
    """The grade where string work decides it, None where symbols must be compared."""
    return quick_judge(_answer(response), _labels(label))


def grade(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """1 if the last box after the reasoning equals the label, as in `math`.

    A response whose reasoning never ends (no </think> or ###Response) is unparseable, and so is one without a box
    after it. The label may be a list of alternatives, and each may have its answer in a box.
    """
    return judge(_answer(response), _labels(label))


def _answer(response: str) -> str | None:
    for mark in _ENDS_OF_REASONING:
        if mark in response:
            return last_boxed(response.rpartition(mark)[2])
    return None


def _labels(label: Any) -> list[str]:
    return [last_boxed(text) or text for text in alternatives(label)]


__all__ = ["grade", "prepare", "quick_grade"]
