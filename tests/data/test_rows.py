"""Parquet files as rows: the same prompts as from JSONL, and what JSON cannot hold."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.fakes import char_tokenizer
from vime.data.prompt_set import PromptSet
from vime.data.prompts import check_rows
from vime.data.records import RowKeys
from vime.errors import DataError

CHAT = RowKeys(label="label", chat=True)
RECORDS: list[dict[str, Any]] = [
    {"input": [{"role": "user", "content": "1+1"}], "label": "2", "metadata": {"level": 1}},
    {
        "input": [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
        ],
        "label": "3",
        "metadata": {"rm_type": "math"},
        "tools": [{"name": "f", "parameters": {"x": "int"}}, {"name": "g"}],
    },
]


def parquet(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return str(path)


def read(word: str, keys: RowKeys = CHAT) -> PromptSet:
    return check_rows([word], keys).tokenise(char_tokenizer())


def test_parquet_and_jsonl_give_the_same_prompts(tmp_path: Path) -> None:
    lines, table = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    lines.write_text("".join(json.dumps(record) + "\n" for record in RECORDS * 3))
    pq.write_table(
        pa.Table.from_pylist([{"tools": None, "other": 1.5, **r} for r in RECORDS * 3]), table, row_group_size=2
    )
    from_lines, from_table = read(str(lines)), read(str(table))
    assert list(from_table) == list(from_lines), "the nulls that Arrow puts into structs are gone"
    assert from_table[3].prompt == RECORDS[1]["input"]
    assert list(read(f"{table}@[-2:]")) == list(from_lines)[-2:]
    assert list(read(str(tmp_path))) == [*from_lines, *from_lines], "a folder may hold both"


def test_metadata_and_tools_may_be_json_text(tmp_path: Path) -> None:
    word = parquet(
        tmp_path / "a.parquet",
        input=["a", "b"],
        label=[1, 2],
        metadata=['{"level": 1}', None],
        tools=['[{"name": "f"}]', None],
    )
    assert [p.metadata for p in read(word)] == [{"level": 1, "tools": [{"name": "f"}]}, {}]


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"text": ["a"], "label": ["b"]}, "has no column 'input'; the columns are ['label', 'text']"),
        ({"input": ["a"]}, "has no column 'label'; the columns are ['input']"),
        ({"input": [1], "label": ["b"]}, "row 0: 'input' is a number; a string or a list of messages"),
        ({"input": [b"a"], "label": ["b"]}, "column 'input' is of type binary, and JSON has no binary"),
        ({"input": ["a"], "label": [datetime.date(2020, 1, 1)]}, "column 'label' is of type date32"),
        ({"input": ["a", "b"], "label": ["b", None]}, "1 of 2 rows cannot be used\n  row 1: 'label' is null"),
        ({"input": ["a"], "label": [float("nan")]}, "row 0: a number is NaN or infinite"),
        ({"input": ["a"], "label": ["b"], "metadata": [3]}, "row 0: 'metadata' is a number; an object is expected"),
        ({"input": pa.array([], pa.string()), "label": []}, "holds no prompts"),
    ],
)
def test_a_parquet_file_that_cannot_be_used_is_named(tmp_path: Path, columns: dict[str, Any], problem: str) -> None:
    word = parquet(tmp_path / "a.parquet", **columns)
    with pytest.raises(DataError) as caught:
        read(word)
    assert word in str(caught.value) and problem in str(caught.value)


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text('{"input": "a"}')
    with pytest.raises(DataError, match=r"a\.parquet is not a Parquet file that can be read"):
        read(str(tmp_path / "a.parquet"))
    with pytest.raises(DataError, match=r"none\.parquet: No such file"):
        read(str(tmp_path / "none.parquet"))
    offsets, latin1 = pa.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0])), pa.py_buffer(b"\xe9")
    text = pa.StringArray.from_buffers(1, offsets, latin1)
    with pytest.raises(DataError, match="UTF"):
        read(parquet(tmp_path / "b.parquet", input=text, label=["a"]))


def test_a_slice_out_of_range_names_the_word(tmp_path: Path) -> None:
    word = parquet(tmp_path / "a.parquet", input=["a"], label=["b"])
    with pytest.raises(DataError, match=r"a\.parquet@\[0:2\]: 2 is out of range; .* has 1 rows"):
        read(f"{word}@[0:2]")


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["input", "input"]), path)
    with pytest.raises(DataError, match="more than one column 'input'; keep one"):
        read(str(path), RowKeys())
