"""The rows of one prompt file: read in order once, then any of them again.

JSONL stays on disk, with the place of every line in memory (24 bytes a line). Of Parquet the columns that are used are
held in memory as Arrow.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vime.config.prompt_files import is_parquet, json_array_problem
from vime.data.bad_row import BadRow
from vime.data.records import RowKeys
from vime.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

_DIGEST_BYTES = 8
_BATCH = 1024  # Parquet rows turned into Python objects at a time
_START = 1 << 16  # bytes looked at before a file is cut into lines
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it was read."""

    index: int
    value: Any
    """The parsed object; None where `problem` says why there is none."""
    problem: str | None
    digest: int
    """64 bits that name the row's content."""


class Rows(Protocol):
    """The rows of one file."""

    path: Path

    def __len__(self) -> int: ...

    def place(self, index: int) -> str:
        """Where a row is, for a person: "line 7"."""

    def scan(self, selected: range) -> Iterator[Row]:
        """Some rows in order, whole and checked for what the format itself forbids."""

    def read(self, index: int, digest: int) -> Any:
        """A row that `scan` gave before. Raises: DataError if the file has changed since."""


def open_rows(path: Path, keys: RowKeys) -> Rows:
    """The rows of a file, by its ending. Raises: DataError if it cannot be read or holds another format."""
    if is_parquet(path):
        return ParquetRows(path, keys)
    return JsonlRows(path)


def changed(rows: Rows, index: int) -> DataError:
    """The error for a row that is not what it was when it was checked."""
    return DataError(
        f"{rows.path}, {rows.place(index)}: the file was changed while the run reads from it; put the old one back and "
        "resume from the last checkpoint, and write new data to a new file"
    )


class JsonlRows:
    """UTF-8 text, one JSON object a line; blank lines do not count."""

    def __init__(self, path: Path) -> None:
        self.path = path
        offsets, lengths, numbers = array("q"), array("q"), array("q")
        try:
            with path.open("rb") as file:
                if whole := json_array_problem(file.read(_START).removeprefix(_BOM)):
                    raise DataError(f"{path} {whole}")
                file.seek(0)
                offset = 0
                for number, line in enumerate(file, 1):
                    if line.removeprefix(_BOM).strip():
                        offsets.append(offset)
                        lengths.append(len(line))
                        numbers.append(number)
                    offset += len(line)
        except OSError as error:
            raise DataError(f"cannot read the prompts in {path}: {error.strerror or error}") from error
        self._offsets = np.array(offsets)
        self._lengths = np.array(lengths)
        self._numbers = np.array(numbers)

    def __len__(self) -> int:
        return len(self._offsets)

    def place(self, index: int) -> str:
        return f"line {self._numbers[index]}"

    def scan(self, selected: range) -> Iterator[Row]:
        with self.path.open("rb") as file:
            for index in selected:
                file.seek(int(self._offsets[index]))
                line = file.read(int(self._lengths[index]))
                value, problem = None, None
                try:
                    value = _parse(line.removeprefix(_BOM), strict=True)
                except BadRow as error:
                    problem = str(error)
                yield Row(index, value, problem, _digest(line))

    def read(self, index: int, digest: int) -> Any:
        try:
            with self.path.open("rb") as file:
                file.seek(int(self._offsets[index]))
                line = file.read(int(self._lengths[index]))
        except OSError as error:
            raise DataError(f"cannot read the prompts in {self.path} again: {error.strerror or error}") from error
        if _digest(line) != digest:
            raise changed(self, index)
        return _parse(line.removeprefix(_BOM), strict=False)


class ParquetRows:
    """The columns of a Parquet file that are used; one row is a dict by column name."""

    def __init__(self, path: Path, keys: RowKeys) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        try:
            with path.open("rb") as raw, pq.ParquetFile(raw) as file:
                schema = file.schema_arrow
                needed = [key for key in (keys.input, keys.label) if key is not None]
                if missing := [key for key in needed if key not in schema.names]:
                    raise DataError(
                        f"{path} has no column {', '.join(map(repr, missing))}; the columns are {sorted(schema.names)}"
                    )
                if twice := [key for key in (*needed, keys.metadata, keys.tools) if schema.names.count(key) > 1]:
                    raise DataError(f"{path} has more than one column {', '.join(map(repr, twice))}; keep one")
                columns = [key for key in (*needed, keys.metadata, keys.tools) if key in schema.names]
                _check_types(path, schema, columns)
                self._table: pa.Table = file.read(columns=columns)
                self._table.validate(full=True)  # text that is not UTF-8, most of all
        except OSError as error:
            raise DataError(f"cannot read the prompts in {path}: {error.strerror or error}") from error
        except pa.ArrowException as error:
            raise DataError(f"{path} is not a Parquet file that can be read: {error}") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def place(self, index: int) -> str:
        return f"row {index}"

    def scan(self, selected: range) -> Iterator[Row]:
        for first in range(selected.start, selected.stop, _BATCH):
            rows = self._table.slice(first, min(_BATCH, selected.stop - first)).to_pylist()
            for index, row in enumerate(rows, first):
                value = _without_nulls(row)
                problem = "a number is NaN or infinite, which JSON cannot hold" if _has_nonfinite(value) else None
                text = json.dumps(value, sort_keys=True)
                yield Row(index, value, problem, _digest(text.encode(errors="surrogatepass")))

    def read(self, index: int, digest: int) -> Any:
        (row,) = self._table.slice(index, 1).to_pylist()
        return _without_nulls(row)


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest(), "little")


def _parse(line: bytes, *, strict: bool) -> Any:
    """The JSON of a line. `strict` also looks for a key given twice, which costs time. Raises: BadRow."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 at byte {error.start}") from error
    try:
        return json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite if strict else None,
            object_pairs_hook=_object_without_twins if strict else None,
        )
    except RecursionError as error:
        raise BadRow("nested too deeply") from error
    except ValueError as error:
        raise BadRow(f"not JSON ({error}); each line holds one whole object") from error


def _refuse_constant(name: str) -> Any:
    raise BadRow(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise BadRow(f"{text[:50]} is beyond what a 64-bit float holds; write it as text")
    return number


def _object_without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise BadRow(f"the key {', '.join(map(repr, twice))} is given twice in one object; keep one")
    return made


def _check_types(path: Path, schema: pa.Schema, columns: Sequence[str]) -> None:
    for name in columns:
        if odd := _odd_type(schema.field(name).type):
            raise DataError(
                f"{path}: the column {name!r} is of type {schema.field(name).type}, and JSON has no {odd}; convert it "
                "to text, numbers, lists or structs"
            )


def _odd_type(kind: pa.DataType) -> str | None:
    """The first type within a column's that has no counterpart in JSON."""
    import pyarrow.types as pt

    plain = (pt.is_null, pt.is_boolean, pt.is_integer, pt.is_floating, pt.is_string, pt.is_large_string)
    if any(test(kind) for test in plain):
        return None
    if pt.is_dictionary(kind) or pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        return _odd_type(kind.value_type)
    if pt.is_struct(kind):
        return next((odd for i in range(kind.num_fields) if (odd := _odd_type(kind.field(i).type))), None)
    return str(kind)


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """A Parquet row without the nulls of nested objects.

    A struct column has every field of every row, so a key that a row never had comes back as null; chat templates and
    metadata must not see it. A column's own null stays, and so does the content of a message.
    """
    return {name: _strip(value) for name, value in row.items()}


def _strip(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _strip(v) for k, v in value.items() if v is not None or (k == "content" and "role" in value)}
    if isinstance(value, list):
        return [_strip(entry) for entry in value]
    return value


def _has_nonfinite(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(_has_nonfinite(v) for v in value.values())
    return isinstance(value, list) and any(_has_nonfinite(v) for v in value)
