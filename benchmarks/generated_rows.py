"""Prompt sets of any size without a file: each row is made when it is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vime.data.prompt_set import PromptSet, Selection
from vime.data.records import RowKeys
from vime.data.rows import Row

_DIGITS = 8
KEYS = RowKeys(input="input", label="label")


class GeneratedRows:
    """Satisfies `vime.data.rows.Rows`: row i asks for the last digit of i."""

    path = Path("generated.jsonl")

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def place(self, index: int) -> str:
        """A row's number."""
        return f"row {index}"

    def scan(self, selected: range) -> Iterator[Row]:
        """Rows in order."""
        for index in selected:
            yield Row(index, self.read(index, index), None, index)

    def read(self, index: int, digest: int) -> Any:
        """The row, written and parsed as a line of a file would be."""
        line = json.dumps({"input": f"{index:0{_DIGITS}d}=", "label": str(index % 10)})
        return json.loads(line)


def generated_prompts(num_rows: int, tokenizer: Any) -> PromptSet:
    """A prompt set over generated rows. Args: tokenizer: one token a character."""
    digit = np.array(tokenizer.convert_tokens_to_ids(list("0123456789")), np.int32)
    rows = np.arange(num_rows, dtype=np.int64)
    tokens = np.empty((num_rows, _DIGITS + 1), np.int32)
    for place in range(_DIGITS):
        tokens[:, place] = digit[rows // 10 ** (_DIGITS - 1 - place) % 10]
    tokens[:, _DIGITS] = tokenizer.convert_tokens_to_ids("=")
    same = np.zeros(num_rows, np.int32)
    return PromptSet(
        KEYS,
        ["generated"],
        [GeneratedRows(num_rows)],
        Selection(same, rows, rows.astype(np.uint64), same),
        tokens.reshape(-1),
        np.full(num_rows, _DIGITS + 1, np.int64),
        num_too_long=0,
        num_over_context=0,
    )
