"""The response is the label, but for white space around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.rewards.grade import CORRECT, UNPARSEABLE, WRONG, Grade


def grade(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """1 if the stripped response equals the stripped label; an empty response is unparseable."""
    answer = response.strip()
    if not answer:
        return UNPARSEABLE
    return CORRECT if answer == str(label).strip() else WRONG
