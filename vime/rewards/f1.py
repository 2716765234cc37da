"""Token F1 of question answering: the overlap of words with the label, as SQuAD's evaluation defines it."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

from vime.rewards.extract import after_thinking
from vime.rewards.grade import UNPARSEABLE, Grade
from vime.rewards.math import alternatives

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def grade(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """The F1 in [0, 1] between the words of the response and of the label, the best one where the label is a list.

    Case, punctuation and English articles do not count; words count as often as they occur. Text up to </think> is
    left out. An empty label means "no answer": only an empty response agrees with it. The verdict is "correct" at 1.
    An empty response to a question that has an answer is unparseable. Source: SQuAD, arXiv:1606.05250, section 6.1.
    """
    words = _words(after_thinking(response))
    wanted = [_words(text) for text in alternatives(label)]
    if not words and all(wanted):
        return UNPARSEABLE
    score = max((_f1(words, other) for other in wanted), default=0.0)
    return Grade(score, "correct" if score == 1.0 else "wrong")


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _f1(words: list[str], wanted: list[str]) -> float:
    if not words or not wanted:
        return float(words == wanted)
    common = sum((Counter(words) & Counter(wanted)).values())
    return 2 * common / (len(words) + len(wanted))  # = 2 p r / (p + r)
