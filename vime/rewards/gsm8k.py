"""GSM8K's convention: the answer is the number after the last ####."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vime.rewards.grade import CORRECT, UNPARSEABLE, WRONG, Grade
from vime.rewards.numbers import canonical_number

_MARKER = "####"
_FIRST_WORD = re.compile(r"\s*(?:\\?\$)?\s*([+-]?)\s*(?:\\?\$)?([0-9.,]*)")


def grade(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """1 if the number after the last #### equals the label's; without marker or number the response is unparseable.

    A label may be the bare number or a worked solution that ends in "#### number". A currency sign before the number,
    separators of thousands and a full stop after it do not count.
    """
    _, marker, tail = response.rpartition(_MARKER)
    answer = _leading_number(tail) if marker else None
    if answer is None:
        return UNPARSEABLE
    return CORRECT if answer == _leading_number(str(label).rpartition(_MARKER)[2]) else WRONG


def _leading_number(text: str) -> str | None:
    match = _FIRST_WORD.match(text)
    assert match is not None  # every part of it may be empty
    return canonical_number(match[1] + match[2].rstrip(".,"))
