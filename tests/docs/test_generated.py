"""Pages that are generated are committed as they would be generated now."""

from pathlib import Path

import pytest

from vime.cli.docs import main, pages
from vime.cli.vime_flags import vime_flags

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name", sorted(pages()))
def test_the_committed_page_is_the_generated_one(name: str) -> None:
    assert (DOCS / name).read_text("utf-8") == pages()[name], f"docs/{name} is old; run `make docs`"


def test_make_docs_writes_every_page(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 0
    assert {p.name: p.read_text("utf-8") for p in tmp_path.iterdir()} == pages()


def test_every_setting_has_one_row_with_a_meaning() -> None:
    rows = [
        line for line in pages()["configuration.md"].splitlines() if line.startswith("| `--") and "`--help" not in line
    ]
    named = [row.split("`")[1].removeprefix("--") for row in rows]
    assert sorted(set(named) & set(vime_flags())) == sorted(vime_flags())
    assert all(row.rstrip(" |").count("|") >= 4 for row in rows if row.split("`")[1].removeprefix("--") in vime_flags())
