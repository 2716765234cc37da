"""Words of --prompt-data: files, folders and slices, and the first look at what they hold."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vime.config.prompt_files import check_prompt_files, parse_prompt_files
from vime.errors import ConfigError


@pytest.mark.parametrize("bounds", ["1:3", ":", ":2", "-2:", "-3:-1", ":-1", "0:5", "-5:", "2:5"])
def test_a_slice_takes_what_python_takes(bounds: str) -> None:
    rows = [*range(5)]
    files = parse_prompt_files(f"a.jsonl@[{bounds}]")
    assert files.path == Path("a.jsonl")
    assert [*files.rows(5)] == eval(f"rows[{bounds}]", {"rows": rows})


@pytest.mark.parametrize(
    ("bounds", "problem"),
    [
        ("0:6", "a.jsonl@[0:6]: 6 is out of range; a.jsonl has 5 rows"),
        ("-6:", "-6 is out of range"),
        ("3:3", "takes no rows of the 5"),
        ("4:1", "takes no rows of the 5"),
    ],
)
def test_a_slice_that_python_would_cut_in_silence_is_refused(bounds: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_prompt_files(f"a.jsonl@[{bounds}]").rows(5)
    assert problem in str(caught.value)


@pytest.mark.parametrize("word", ["a@[1]", "a@[::2]", "a@[x:]", "a@[1:2"])
def test_another_kind_of_slice_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="a slice is written path@"):
        parse_prompt_files(word)


def test_a_file_whose_name_looks_like_a_slice_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a@[0:1]"
    path.touch()
    assert parse_prompt_files(str(path)).path == path


def test_a_folder_stands_for_its_files_by_name(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.parquet", "notes.txt"):
        (tmp_path / name).touch()
    assert [p.name for p in parse_prompt_files(f"{tmp_path}@[:1]").files()] == ["a.parquet", "b.jsonl"]
    (tmp_path / "sub").mkdir()
    with pytest.raises(ConfigError, match=r"sub is a folder without \*\.jsonl or \*\.parquet files"):
        parse_prompt_files(str(tmp_path / "sub")).files()


def test_the_first_look_finds_what_is_wrong_with_each_file(tmp_path: Path) -> None:
    good = {"input": "a", "label": "b"}
    pq.write_table(pa.table({"text": ["a"], "label": ["b"]}), tmp_path / "columns.parquet")
    pq.write_table(pa.table({"input": pa.array([], pa.string()), "label": []}), tmp_path / "empty.parquet")
    (tmp_path / "fake.parquet").write_text("no")
    (tmp_path / "fine.jsonl").write_text(json.dumps(good) + "\n")
    (tmp_path / "latin.jsonl").write_bytes(json.dumps(good).encode() + b'\n{"input": "\xe9"}\n')
    (tmp_path / "pretty.jsonl").write_text(json.dumps(good, indent=1))
    (tmp_path / "array.jsonl").write_text(json.dumps([good]))
    found = [p.replace(str(tmp_path), "") for p in check_prompt_files("--x", str(tmp_path), ["input", "label"])]
    assert found[0].startswith("--x /array.jsonl begins with a JSON array, but one object a line is expected")
    assert found[1].startswith("--x /columns.parquet has no key 'input', only 'text', 'label'")
    assert found[2] == "--x /empty.parquet is empty"
    assert found[3].startswith("--x /fake.parquet is not a Parquet file")
    assert found[4].startswith("--x /latin.jsonl, line 2: not UTF-8 at byte 11")
    assert found[5].startswith("--x /pretty.jsonl, line 1: not JSON") and "one whole object" in found[5]
    assert len(found) == 6
    assert list(check_prompt_files("--x", f"{tmp_path / 'latin.jsonl'}@[:1]", ["input"])) == [], (
        "a slice may leave it out"
    )
