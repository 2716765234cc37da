"""Rows of a data set's files, from the hub or from a local path, and the JSONL that a run reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

_BATCH = 4096
_HUB_TIMEOUT_S = 10.0


class BadData(Exception):
    """A file is not what it should be; the message names it."""


def hub_file(repo: str, path: str, flag: str) -> Path:
    """A data set's file, in the hub client's cache. Raises: BadData naming the flag that takes another file."""
    from huggingface_hub import HfApi, hf_hub_download

    reason = ""
    try:
        HfApi().dataset_info(repo, timeout=_HUB_TIMEOUT_S)  # fails at once; the download retries for half a minute
    except Exception as error:  # errors of httpx, of the hub's client or of the file system, by its version
        reason = _in_words(error)
    try:
        return Path(hf_hub_download(repo, path, repo_type="dataset", local_files_only=bool(reason)))
    except Exception as error:
        raise BadData(
            f"the hub did not give {path} of the data set {repo} ({reason or _in_words(error)}); download it where "
            f"the hub can be reached, and give the file by {flag}"
        ) from error


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file, or of a file with one JSON object a line, with these columns.

    Raises: BadData if the file is missing or damaged, or lacks a column.
    """
    if not path.is_file():
        raise BadData(f"{path} is not a file")
    yield from _parquet(path, columns) if path.suffix == ".parquet" else _jsonl(path, columns)


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write `rows`, complete or not at all. Returns: how many. Raises: BadData if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    count = 0
    with partial.open("w", encoding="utf-8") as file:
        for count, row in enumerate(rows, 1):  # noqa: B007
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    if not count:
        partial.unlink()
        raise BadData(f"nothing to write to {path}")
    partial.replace(path)
    return count


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            _check(path, columns, file.schema_arrow.names)
            for batch in file.iter_batches(_BATCH, columns=list(columns)):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise BadData(f"{path} is not a Parquet file that can be read: {error}") from error


def _jsonl(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise BadData(f"{path}:{number} is not JSON ({error})") from error
            if not isinstance(row, dict):
                raise BadData(f"{path}:{number} is no JSON object")
            _check(f"{path}:{number}", columns, row)
            yield {name: row[name] for name in columns}


def _check(where: object, columns: Sequence[str], there: Iterable[str]) -> None:
    if missing := [name for name in columns if name not in there]:
        raise BadData(f"{where} has no {', '.join(missing)}; it has {', '.join(sorted(there))}")
