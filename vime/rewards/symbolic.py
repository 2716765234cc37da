"""Symbolic equality of two LaTeX answers through math-verify. Import it only where it may be killed."""

from __future__ import annotations

import logging
import re

from math_verify import LatexExtractionConfig, parse, verify

# math-verify's own time limits use signal.alarm, which works in a main thread only and cannot interrupt C code; they
# are off here because the worker process is killed from outside. It warns about that on every start.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# Numbers of this kind have millions of digits, or underflow to equal floats: the algebra system cannot tell them
# apart in bounded time, so only equal spelling counts (which the caller has checked).
_TOWER = re.compile(r"\^\s*\{[^{}]*\^\s*\{[^{}]*\^")
_LARGE_FACTORIAL = re.compile(r"[0-9]{4,}\s*!")
_LARGE_POWER = re.compile(r"\^\s*\{?\s*[0-9]{6,}")


def equal(gold: str, answer: str) -> bool:
    """Whether both are the same mathematics. An answer or label that does not parse equals nothing.

    Args: gold, answer: LaTeX without a box and without dollar signs.
    """
    if any(_is_beyond_computing(text) for text in (gold, answer)):
        return False
    parsed_gold, parsed_answer = _parse(gold), _parse(answer)
    if not parsed_gold or not parsed_answer:
        return False
    return bool(verify(parsed_gold, parsed_answer, timeout_seconds=None))


def _is_beyond_computing(text: str) -> bool:
    return any(pattern.search(text) for pattern in (_TOWER, _LARGE_FACTORIAL, _LARGE_POWER))


def _parse(text: str) -> list[object]:
    # Only LaTeX is parsed: math-verify's plain-expression parser goes through Python's eval.
    return list(parse(f"${text}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=None))
