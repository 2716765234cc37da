"""Multiple choice: the letter that the response settles on. Upstream calls it gpqa.

A letter counts where the response states it as its answer: in a box, after "answer is", or alone on the first or last
line. Letters that merely occur ("Plan B", the article "A") never do, and naming two is no answer.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from vime.rewards.extract import after_thinking, last_boxed
from vime.rewards.grade import CORRECT, UNPARSEABLE, WRONG, Grade

_DEFAULT_LETTERS = string.ascii_uppercase[:10]
_MAX_LINE_CHARS = 400  # a line that states a choice is short
_MARKUP = re.compile(r"[*_`$]+|\\(?:text|textbf|mathrm|mathbf|textit)\s*(?=\{)|[{}]|\\[()\[\]]")
_STATEMENT = re.compile(
    r"\b(answer|option|choice)\b(?:\s+(?:is|would\s+be|must\s+be))?\s*:?\s*(?:(?:option|choice)\s+)?", re.IGNORECASE
)
# "C", "(C)", "[C]", "C.", "C)", "C: Paris" and what may follow it
_LETTER = re.compile(r"([(\[]?)\s*([A-Za-z])(?![A-Za-z0-9'\u2019])(?:\s*([)\].:,-]))?")
_SECOND_LETTER = re.compile(r"\s*(?:,|/|&|\bor\b|\band\b)\s*(?:(?:option|choice)\s+)?[(\[]?([A-Z])(?![A-Za-z0-9'])")
# "option A is too small" speaks of an option; "option A because ..." and "option A." choose it.
_SPEAKS_OF = re.compile(r"\s+(?!because\b|since\b|as\b|or\b|and\b|is\s+(?:the\s+)?(?:correct|right|best)\b)[a-z]")
_IS_RIGHT = re.compile(r"[(\[]?\b([A-Z])\b[)\]]?\s+is\s+(?:the\s+)?(?:correct|right|best)\b(?!\s+only)")


def grade(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """1 if the response chooses the label's letter; without a clear choice it is unparseable.

    Args:
        label: the right letter, the right choice's text (with metadata.choices), or its index from 0.
        metadata: "choices": list of texts, or mapping of letters to texts. "valid_letters": by default one a choice, or
            A to J. "correct_letter" overrides the label.
    """
    choices = metadata.get("choices")
    texts: list[str] = [str(c) for c in (choices.values() if isinstance(choices, Mapping) else choices or ())]
    letters = _letters(metadata.get("valid_letters"), choices, len(texts))
    chosen = _chosen(after_thinking(response), letters, texts)
    if chosen is None:
        return UNPARSEABLE
    given = metadata.get("correct_letter")
    return CORRECT if chosen == _right_letter(label if given is None else given, letters, texts) else WRONG


def _letters(valid: Any, choices: Any, num_choices: int) -> Sequence[str]:
    if valid:
        return [str(letter).strip().upper() for letter in valid]
    if isinstance(choices, Mapping):
        return [str(letter).strip().upper() for letter in choices]
    return string.ascii_uppercase[:num_choices] if num_choices else _DEFAULT_LETTERS


def _right_letter(label: Any, letters: Sequence[str], texts: Sequence[str]) -> str | None:
    if isinstance(label, int) and not isinstance(label, bool):
        return letters[label] if 0 <= label < len(letters) else None
    text = str(label)
    return _letter_of_text(text, letters, texts) or _lone_letter(_plain(text), letters)


def _chosen(text: str, letters: Sequence[str], texts: Sequence[str]) -> str | None:
    """The letter that the text settles on: the last box, else the last statement, else a line of its own."""
    box = last_boxed(text)
    if box is not None:
        return _letter_of_text(box, letters, texts) or _lone_letter(_plain(box), letters)
    lines = [line for line in (_plain(line[:_MAX_LINE_CHARS]) for line in text.splitlines()) if line]
    for i in range(len(lines) - 1, -1, -1):
        stated, letter = _stated(lines[i], lines[i + 1] if i + 1 < len(lines) else "", letters, texts)
        if stated:
            return letter
    for line in (lines[-1:] + lines[:1]) if lines else ():
        if letter := _letter_of_text(line, letters, texts) or _lone_letter(line, letters):
            return letter
    return None


def _stated(line: str, next_line: str, letters: Sequence[str], texts: Sequence[str]) -> tuple[bool, str | None]:
    """Whether the line states an answer, and its letter; None where it names several."""
    places: list[tuple[int, str | None]] = []
    for match in _STATEMENT.finditer(line):
        rest = line[match.end() :]
        if not rest and line[match.start() : match.end()].rstrip().endswith(":"):
            rest = next_line
        letter = _letter_of_text(rest, letters, texts)
        if letter is not None:
            places.append((match.start(), letter))
        elif first := _first_letter(rest, letters):
            if match[1].lower() != "answer" and _SPEAKS_OF.match(rest, first.end()):
                continue
            second = _SECOND_LETTER.match(rest, first.end() - (first[3] == ","))
            is_several = second is not None and second[1] in letters and second[1] != first[2].upper()
            places.append((match.start(), None if is_several else first[2].upper()))
    places += [(match.start(), match[1]) for match in _IS_RIGHT.finditer(line) if match[1] in letters]
    return (True, max(places, key=lambda place: place[0])[1]) if places else (False, None)


def _first_letter(text: str, letters: Sequence[str]) -> re.Match[str] | None:
    """The letter that `text` begins with, unless it is a word of the sentence ("a matter of", "I think")."""
    match = _LETTER.match(text)
    if match is None or match[2].upper() not in letters:
        return None
    rest = text[match.end() :]
    is_marked = bool(match[1] or match[3]) or not rest.strip()
    if is_marked or (match[2].isupper() and match[2] not in "AI"):
        return match
    is_word = match[2].islower() or re.match(r"\s*(?!is\b|because\b|since\b|as\b|or\b|and\b)[a-z]", rest) is not None
    return None if is_word or match[2] == "I" else match


def _lone_letter(line: str, letters: Sequence[str]) -> str | None:
    """The letter of a line that is nothing but one, or one with its choice's text ("C) Paris")."""
    match = _LETTER.match(line)
    if match is None or match[2].upper() not in letters:
        return None
    rest = line[match.end() :].strip()
    if not rest.strip("."):
        return match[2].upper()
    has_label = match[3] is not None and match[3] in ")].:"
    second = _SECOND_LETTER.match(line, match.end())
    return match[2] if has_label and match[2].isupper() and second is None else None


def _letter_of_text(text: str, letters: Sequence[str], texts: Sequence[str]) -> str | None:
    """The letter of the one choice whose text this is."""
    wanted = _bare(text)
    found = [letter for letter, choice in zip(letters, texts, strict=False) if wanted and _bare(choice) == wanted]
    return found[0] if len(found) == 1 else None


def _plain(text: str) -> str:
    return " ".join(_MARKUP.sub(" ", text).split())


def _bare(text: str) -> str:
    return _plain(text).rstrip(". ").casefold()
