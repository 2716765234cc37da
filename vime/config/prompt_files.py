"""What a word of --prompt-data names: a JSONL or Parquet file, a folder of them, or a slice `path@[a:b]` of those."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vime.errors import ConfigError

_SLICE = re.compile(r"(.+)@\[(-?\d+)?:(-?\d+)?\]", re.DOTALL)
_ENDINGS = (".jsonl", ".parquet")  # what a folder is searched for; a file given by name may end in anything
_LINES_READ = 64  # enough to see a wrong key or format; every row is read before the run's processes start
_SHOWN = 100  # characters of a path that cannot be
_BYTES_READ = 1 << 20  # of a file that may be one endless line


@dataclass(frozen=True, slots=True)
class PromptFiles:
    """One word of --prompt-data, taken apart."""

    word: str
    path: Path
    start: int | None = None
    stop: int | None = None

    def files(self) -> list[Path]:
        """The file itself, or a folder's files by name. Raises: ConfigError if there are none."""
        if not self.path.is_dir():
            return [self.path]
        found = sorted(p for p in self.path.iterdir() if p.suffix in _ENDINGS and p.is_file())
        if not found:
            raise ConfigError(f"{self.path} is a folder without {' or '.join('*' + e for e in _ENDINGS)} files")
        return found

    def rows(self, total: int) -> range:
        """The rows that the slice takes of `total`, counted as Python does.

        Raises: ConfigError if a bound lies outside the rows or nothing is left; Python would cut in silence.
        """
        start, stop, _ = slice(self.start, self.stop).indices(total)
        outside = [b for b in (self.start, self.stop) if b is not None and not -total <= b <= total]
        if outside:
            raise ConfigError(f"{self.word}: {outside[0]} is out of range; {self.path} has {total} rows")
        if start >= stop and (self.start, self.stop) != (None, None):
            raise ConfigError(f"{self.word} takes no rows of the {total} in {self.path}")
        return range(start, stop)


def is_parquet(path: Path) -> bool:
    """Whether a file is read as Parquet; every other one is JSONL."""
    return path.suffix == ".parquet"


def parse_prompt_files(word: str) -> PromptFiles:
    """Take `path` or `path@[a:b]` apart. Raises: ConfigError for another kind of slice, or what no path can be."""
    try:
        is_there = Path(word).exists()
        Path(word.partition("@[")[0]).exists()
        if "\0" in word:
            raise ValueError("it holds a null character")
    except (OSError, ValueError) as error:
        shown = word if len(word) <= _SHOWN else f"{word[:_SHOWN]}…"
        raise ConfigError(f"{shown!r} cannot be looked for: {getattr(error, 'strerror', None) or error}") from error
    if is_there:
        return PromptFiles(word, Path(word))
    if match := _SLICE.fullmatch(word):
        start, stop = (None if bound is None else int(bound) for bound in match.groups()[1:])
        return PromptFiles(word, Path(match[1]), start, stop)
    if "@[" in word:
        raise ConfigError(f"{word}: a slice is written path@[a:b] with whole numbers, either of which may be left out")
    return PromptFiles(word, Path(word))


def check_prompt_files(flag: str, word: str, keys: Sequence[str]) -> Iterator[str]:
    """What is wrong with the first rows of what a word names, one sentence for each file.

    Cheap: of a JSONL file the first 64 lines are parsed (none of a slice, which may leave them out), of a Parquet file
    only the schema is read.

    Args: flag: what the sentences begin with. keys: that every row must have.
    """
    try:
        named = parse_prompt_files(word)
        files = named.files()
    except ConfigError as error:
        yield from (f"{flag} {problem}" for problem in error.problems)
        return
    for path in files:
        lines = _LINES_READ if (named.start, named.stop) == (None, None) else 0
        problem = _parquet_problem(path, keys) if is_parquet(path) else _jsonl_problem(path, keys, lines)
        if problem is not None:
            yield f"{flag} {path}{problem}"


def _jsonl_problem(path: Path, keys: Sequence[str], num_lines: int) -> str | None:
    seen = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_BYTES_READ), b""), 1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if not line.strip():
                    continue
                if not seen and (whole := json_array_problem(line)):
                    return f" {whole}"
                seen += 1
                if not num_lines:
                    break
                if len(line) == _BYTES_READ and not line.endswith(b"\n"):
                    break  # longer than is read here
                if problem := _line_problem(line, keys):
                    return f", line {number}: {problem}"
                if seen == num_lines:
                    break
    except OSError as error:
        return f" cannot be read: {error.strerror or error}"
    return None if seen else " is empty"


def json_array_problem(first_line: bytes) -> str | None:
    """What is wrong with a file that begins like this, if it holds one JSON array instead of lines."""
    text = first_line.strip()
    if not text.startswith(b"["):
        return None
    return "begins with a JSON array, but one object a line is expected (JSONL); with jq: jq -c '.[]' FILE > FILE.jsonl"


def _line_problem(line: bytes, keys: Sequence[str]) -> str | None:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start}; the file must be UTF-8 text"
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error}); each line holds one whole object"
    if not isinstance(record, dict):
        return f"holds a {type(record).__name__}, not an object"
    if missing := [key for key in keys if key not in record]:
        return _missing(missing, list(record))
    return None


def _parquet_problem(path: Path, keys: Sequence[str]) -> str | None:
    import pyarrow as pa  # tenths of a second, for those who have Parquet files
    import pyarrow.parquet as pq

    try:
        with path.open("rb") as raw, pq.ParquetFile(raw) as file:
            names, num_rows = file.schema_arrow.names, file.metadata.num_rows
    except OSError as error:
        return f" cannot be read: {error.strerror or error}"
    except pa.ArrowException as error:
        return f" is not a Parquet file ({error})"
    if not num_rows:
        return " is empty"
    if missing := [key for key in keys if key not in names]:
        return " " + _missing(missing, names)
    return None


def _missing(missing: Sequence[str], present: Sequence[str]) -> str:
    return (
        f"has no key {', '.join(map(repr, missing))}, only {', '.join(map(repr, present))}; "
        "see --input-key and --label-key"
    )
