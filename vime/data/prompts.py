"""Prompt files: every row checked, every prompt rendered and tokenised once.

Two steps, because the first is cheap and should come before anything starts: `check_rows` reads every row of every
file, `tokenise` renders and tokenises them.
"""

from __future__ import annotations

import itertools
import logging
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vime.config.modes import learns_answers
from vime.config.prompt_files import parse_prompt_files
from vime.data.answer_check import AnswerCheck
from vime.data.answers import Answers, make_answers
from vime.data.bad_row import BadRow
from vime.data.chat import prompt_text
from vime.data.prompt_set import PromptSet, Selection
from vime.data.records import RowKeys, check_named_hook, check_overrides, named_hooks, read_record
from vime.data.rows import Rows, changed, open_rows
from vime.errors import ConfigError, DataError

if TYPE_CHECKING:
    from vime.config import Config

logger = logging.getLogger(__name__)

_TOKENISE_AT_ONCE = 1024  # texts handed to the tokenizer in one call: enough to use its threads, bounded memory
_SHOWN = 5  # bad rows spelled out in an error; the rest are counted


class CheckedRows:
    """What `check_rows` gives: rows that can be used, not tokenised yet."""

    def __init__(self, keys: RowKeys, words: Sequence[str], files: Sequence[Rows], selected: Selection) -> None:
        self._keys, self._words, self._files, self._selected = keys, tuple(words), files, selected

    def __len__(self) -> int:
        return len(self._selected.row)

    def tokenise(
        self,
        tokenizer: Any,
        *,
        chat_kwargs: Mapping[str, Any] | None = None,
        max_prompt_len: int | None = None,
        max_context_len: int | None = None,
        answers: Answers | None = None,
        drop_long_answers: bool = False,
    ) -> PromptSet:
        """Render and tokenise every prompt, and leave out those that are too long.

        Text is tokenised as it stands: no special tokens are added, since a template writes its own.

        Args:
            tokenizer: a transformers tokenizer.
            chat_kwargs: for the chat template; a row's metadata.apply_chat_template_kwargs wins.
            max_prompt_len: prompts of more tokens are left out and counted.
            max_context_len: tokens that prompt and response may have together; prompts that leave no room for a
                response are left out and counted.
            answers: of supervised data: each row's is rendered as well, so that what cannot be learnt is found now.
            drop_long_answers: leave out and count rows with an answer that would be cut.
        Raises: DataError with the rows that the chat template refuses, or that have no tokens; or if none is left.
        """
        lengths = np.zeros(len(self), np.int64)
        chunks: list[npt.NDArray[np.int32]] = []
        problems = _Problems(self._files)
        refused: set[int] = set()
        learnt = None if answers is None else AnswerCheck(answers, len(self), measures=drop_long_answers)
        for start, texts in self._texts(tokenizer, dict(chat_kwargs or {}), problems, refused, learnt):
            batch = tokenizer(texts, add_special_tokens=False)["input_ids"]
            lengths[start : start + len(texts)] = [len(ids) for ids in batch]
            chunks.append(np.fromiter((i for ids in batch for i in ids), np.int32))
        for i in np.flatnonzero(lengths == 0).tolist():
            if i not in refused:
                problems.add(int(self._selected.file[i]), int(self._selected.row[i]), "the prompt has no tokens")
        for i, problem in learnt.too_long.items() if learnt is not None else ():
            if max_prompt_len is None or lengths[i] <= max_prompt_len:
                problems.add(int(self._selected.file[i]), int(self._selected.row[i]), problem)
        problems.refuse()
        tokens = np.concatenate(chunks)
        if learnt is not None:
            learnt.warn()
        return self._within(tokens, lengths, max_prompt_len, max_context_len, None if learnt is None else learnt.over)

    def _texts(
        self,
        tokenizer: Any,
        chat_kwargs: Mapping[str, Any],
        problems: _Problems,
        refused: set[int],
        learnt: AnswerCheck | None,
    ) -> Iterator[tuple[int, list[str]]]:
        """Batches of texts with the position of the first; refused rows are noted, and have an empty text."""
        texts: list[str] = []
        position = 0
        for file, row in _runs(self._selected):
            rows = self._files[file]
            for read in rows.scan(row):
                if read.digest != self._selected.digest[position]:
                    raise changed(rows, read.index)
                record = read_record(read.value, self._keys)
                try:
                    text = prompt_text(record, tokenizer, chat=self._keys.chat, kwargs=chat_kwargs)
                    if learnt is not None:
                        learnt.look(position, record, text)
                except BadRow as problem:
                    problems.add(file, read.index, str(problem))
                    refused.add(position)
                    text = ""
                texts.append(text)
                position += 1
                if len(texts) == _TOKENISE_AT_ONCE:
                    yield position - len(texts), texts
                    texts = []
        if texts:
            yield position - len(texts), texts

    def _within(
        self,
        tokens: npt.NDArray[np.int32],
        lengths: npt.NDArray[np.int64],
        max_prompt_len: int | None,
        max_context_len: int | None,
        long_answers: npt.NDArray[np.bool_] | None,
    ) -> PromptSet:
        too_long = lengths > (max_prompt_len if max_prompt_len is not None else np.iinfo(np.int64).max)
        over = ~too_long & (lengths >= (max_context_len if max_context_len is not None else np.iinfo(np.int64).max))
        cut = (long_answers if long_answers is not None else np.zeros(len(self), np.bool_)) & ~too_long & ~over
        keep = ~(too_long | over | cut)
        dropped = {
            f"longer than --rollout-max-prompt-len {max_prompt_len}": too_long,
            f"without room for a response in --rollout-max-context-len {max_context_len}": over,
            "with an answer above --rollout-max-response-len or the context (--sft-overlong drop)": cut,
        }
        for part, word in enumerate(self._words):
            inside = self._selected.part == part
            counts = {why: int((inside & which).sum()) for why, which in dropped.items()}
            said = "; ".join(f"{count} are {why}" for why, count in counts.items() if count)
            if not (inside & keep).any():
                raise DataError(
                    f"{word}: none of its {int(inside.sum())} prompts can be used: {said}; "
                    f"the shortest has {int(lengths[inside].min())} tokens"
                )
            if said:
                logger.warning(
                    "%s: %d of %d prompts are left out: %s (the longest has %d tokens)",
                    word,
                    sum(counts.values()),
                    int(inside.sum()),
                    said,
                    int(lengths[inside].max()),
                )
        return PromptSet(
            self._keys,
            self._words,
            self._files,
            self._selected.take(keep),
            tokens[np.repeat(keep, lengths)] if not keep.all() else tokens,
            lengths[keep],
            num_too_long=int(too_long.sum()),
            num_over_context=int(over.sum()),
            num_long_answers=int(cut.sum()),
        )


def row_keys(config: Config) -> RowKeys:
    """How the training prompts' rows are read."""
    data = config.data
    return RowKeys(
        data.input_key,
        data.label_key,
        data.metadata_key,
        data.tool_key,
        data.apply_chat_template,
        answers=data.sft_turns if learns_answers(config) else None,
    )


def check_prompts(config: Config, reward_names: Mapping[str, str | None] | None) -> CheckedRows:
    """Every row of --prompt-data, read and checked. Raises: DataError, ConfigError."""
    if not config.data.prompt_data:
        raise DataError("no --prompt-data is given: name a JSONL or Parquet file of prompts")
    return check_rows(config.data.prompt_data, row_keys(config), reward_names=reward_names)


def tokenise_prompts(config: Config, rows: CheckedRows, tokenizer: Any) -> PromptSet:
    """The training prompts, within the configured lengths. Raises: DataError."""
    return rows.tokenise(
        tokenizer,
        chat_kwargs=config.data.apply_chat_template_kwargs,
        max_prompt_len=config.data.rollout_max_prompt_len,
        max_context_len=config.rollout.rollout_max_context_len,
        answers=make_answers(config, tokenizer) if learns_answers(config) else None,
        drop_long_answers=config.data.sft_overlong == "drop",
    )


def check_rows(
    words: Sequence[str], keys: RowKeys, *, reward_names: Mapping[str, str | None] | None = None
) -> CheckedRows:
    """Read every row that the words name, and check all that can be checked without a tokenizer.

    A prompt is a string, or a list of chat messages; messages need the chat template, and with it a string is one user
    message. Functions that rows name in their metadata are imported, each once, and their parameters checked.

    Args:
        words: files, folders, and slices of them (`vime.config.prompt_files`).
        reward_names: what metadata.rm_type may say, and why this run cannot use it, if so; None: anything.
    Raises: DataError naming each file, its first bad rows with what is wrong, and how many there are.
    """
    files: list[Rows] = []
    columns = (array("i"), array("q"), array("Q"), array("i"))  # compact: there may be millions
    problems = _Problems(files)
    hooks: dict[tuple[str, str], tuple[int, int]] = {}  # where each is named first
    for part, word in enumerate(words):
        selected = list(_open_word(word, keys, files))
        before = len(columns[0])
        for file, rows in selected:
            for read in files[file].scan(rows):
                problems.num_read[file] = problems.num_read.get(file, 0) + 1
                try:
                    if read.problem is not None:
                        raise BadRow(read.problem)
                    record = read_record(read.value, keys)
                    check_overrides(record.metadata, chat=keys.chat, reward_names=reward_names)
                except BadRow as problem:
                    problems.add(file, read.index, str(problem))
                    continue
                for hook in named_hooks(record.metadata):
                    hooks.setdefault(hook, (file, read.index))
                for column, value in zip(columns, (file, read.index, read.digest, part), strict=True):
                    column.append(value)
        if len(columns[0]) == before and not problems:
            raise DataError(f"{word} holds no prompts")
    for (key, path), (file, row) in hooks.items():
        try:
            check_named_hook(key, path)
        except ConfigError as error:
            problems.add(file, row, f"metadata.{key} {error}")
    problems.refuse()
    return CheckedRows(
        keys,
        words,
        files,
        Selection(*(np.array(column) for column in columns)),
    )


def _open_word(word: str, keys: RowKeys, files: list[Rows]) -> Iterator[tuple[int, range]]:
    """Open a word's files, append them to `files`, and give the rows selected of each by its index there."""
    try:
        named = parse_prompt_files(word)
        opened = [open_rows(path, keys) for path in named.files()]
        selected = named.rows(sum(len(rows) for rows in opened))
    except ConfigError as error:
        raise DataError(str(error)) from error
    first = 0
    for rows in opened:
        inside = range(max(selected.start - first, 0), min(selected.stop - first, len(rows)))
        first += len(rows)
        files.append(rows)
        if inside:
            yield len(files) - 1, inside


def _runs(selected: Selection) -> Iterator[tuple[int, range]]:
    """The selected rows as runs of neighbours in one file."""
    breaks = np.flatnonzero((np.diff(selected.row) != 1) | (np.diff(selected.file) != 0)) + 1
    edges = [0, *breaks.tolist(), len(selected.row)]
    for start, end in itertools.pairwise(edges):
        yield int(selected.file[start]), range(int(selected.row[start]), int(selected.row[end - 1]) + 1)


class _Problems:
    """Bad rows by file; the first of each file are kept, the rest counted."""

    def __init__(self, files: Sequence[Rows]) -> None:
        self.num_read: dict[int, int] = {}
        self._files = files
        self._found: dict[int, list[tuple[int, str]]] = {}
        self._counts: Counter[int] = Counter()

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, file: int, row: int, problem: str) -> None:
        """A row cannot be used."""
        self._counts[file] += 1
        found = self._found.setdefault(file, [])
        if len(found) < _SHOWN:
            found.append((row, problem))

    def refuse(self) -> None:
        """Raises: DataError naming all that was found, if anything was."""
        if self._found:
            raise DataError("\n".join(self._of_file(file, found) for file, found in sorted(self._found.items())))

    def _of_file(self, file: int, found: Sequence[tuple[int, str]]) -> str:
        rows, count = self._files[file], self._counts[file]
        total = self.num_read.get(file, len(rows))
        shown = [f"{rows.place(row)}: {problem}" for row, problem in sorted(found)]
        more = [f"… and {count - len(shown)} more"] if count > len(shown) else []
        what = rows.place(0).split()[0] + "s"
        return "\n  ".join([f"{rows.path}: {count} of {total} {what} cannot be used", *shown, *more])
