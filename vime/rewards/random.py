"""A coin: 0 or 1 without looking at the answer, for load tests and as a baseline that nothing can be learnt from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from vime.rewards.grade import CORRECT, WRONG, Grade


def grade(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """0 or 1 with equal chance, drawn from the response's text, so that a run can be repeated."""
    return CORRECT if hashlib.sha256(response.encode("utf-8", "replace")).digest()[0] & 1 else WRONG
