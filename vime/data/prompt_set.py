"""A set of prompts in memory: compact, indexable, named by its content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vime.data.records import RowKeys, read_record
from vime.data.rows import Rows
from vime.types import Message


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as the buffer hands it out."""

    prompt: str | list[Message]
    """What the file held."""
    tokens: tuple[int, ...]
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    """The row's metadata object; `tools`, where the row had them, are kept under that key."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows of the files, in order, as columns: which file, which of its rows, the row's digest, which word named it."""

    file: npt.NDArray[np.int32]
    row: npt.NDArray[np.int64]
    digest: npt.NDArray[np.uint64]
    part: npt.NDArray[np.int32]

    def take(self, keep: npt.NDArray[np.bool_]) -> Selection:
        """Those under the mask."""
        return Selection(self.file[keep], self.row[keep], self.digest[keep], self.part[keep])


class PromptSet(Sequence[Prompt]):
    """The prompts of one or several files, in the order given: token ids in memory, the rest read again when asked for.

    A million prompts stay compact: 4 bytes a token and 32 a prompt, and what `vime.data.rows` says. No text is
    tokenised twice.
    """

    def __init__(
        self,
        keys: RowKeys,
        words: Sequence[str],
        files: Sequence[Rows],
        selected: Selection,
        tokens: npt.NDArray[np.int32],
        lengths: npt.NDArray[np.int64],
        *,
        num_too_long: int,
        num_over_context: int,
        num_long_answers: int = 0,
    ) -> None:
        self.words = tuple(words)
        """The words of --prompt-data."""
        self.num_too_long = num_too_long
        """Prompts left out because they were longer than the limit."""
        self.num_over_context = num_over_context
        """Prompts left out because they left no room for a response in the context."""
        self.num_long_answers = num_long_answers
        """Prompts left out because their answer would have been cut."""
        self._keys, self._files, self._selected, self._tokens = keys, files, selected, tokens
        self._offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=self._offsets[1:])

    def __len__(self) -> int:
        return len(self._selected.row)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        index %= len(self)
        rows, at = self._files[self._selected.file[index]], self._selected
        record = read_record(rows.read(int(at.row[index]), int(at.digest[index])), self._keys)
        ids = self._tokens[self._offsets[index] : self._offsets[index + 1]]
        return Prompt(record.prompt, tuple(ids.tolist()), record.label, record.metadata)

    def __iter__(self) -> Iterator[Prompt]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[len(self)] prompt tokens."""
        return np.diff(self._offsets)

    @property
    def num_dropped(self) -> int:
        """Prompts left out for their length, whichever limit it was."""
        return self.num_too_long + self.num_over_context + self.num_long_answers

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Prompts of each word."""
        return tuple(np.bincount(self._selected.part, minlength=len(self.words)).tolist())

    def fingerprints(self) -> dict[str, str]:
        """For each word a name of its content: rows, how they are read, and token ids. Equal names, equal prompts."""
        ends = np.cumsum(self.part_sizes)
        found: dict[str, str] = {}
        for i, (word, end) in enumerate(zip(self.words, ends.tolist(), strict=True)):
            start = end - self.part_sizes[i]
            digest = hashlib.blake2b(repr(self._keys).encode(), digest_size=16)
            digest.update(self._selected.digest[start:end].tobytes())
            digest.update(self.lengths[start:end].tobytes())
            digest.update(self._tokens[self._offsets[start] : self._offsets[end]].tobytes())
            found[f"{i + 1}: {word}"] = digest.hexdigest()
        return found
