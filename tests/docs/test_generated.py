"""Pages that are generated are committed as they would be generated now."""

import re
from pathlib import Path

import pytest

from vime.cli.docs import main, pages
from vime.cli.parse import Catalogue
from vime.cli.upstream import read_flags
from vime.cli.vime_flags import vime_flags

DOCS = Path(__file__).resolve().parents[2] / "docs"

OF_THE_PARSER = {"config"}


@pytest.mark.parametrize("name", sorted(pages(DOCS)))
def test_the_committed_page_is_the_generated_one(name: str) -> None:
    assert (DOCS / name).read_text("utf-8") == pages(DOCS)[name], f"docs/{name} is old; run `make docs`"


def test_make_docs_writes_every_page(tmp_path: Path) -> None:
    for name in ("coming_from_slime_and_vime.md", "customization.md", "recipes.md"):
        (tmp_path / name).write_text((DOCS / name).read_text("utf-8"), "utf-8")
    assert main([str(tmp_path)]) == 0
    written = {p.name: p.read_text("utf-8") for p in tmp_path.glob("*.md")}
    assert written.pop("recipes.md") == (DOCS / "recipes.md").read_text("utf-8"), "run `make docs`"
    assert written == pages(DOCS)


def test_every_setting_has_one_row_with_a_meaning() -> None:
    rows = [line for line in pages(DOCS)["configuration.md"].splitlines() if line.startswith("| `--")]
    cells = {row.split("`")[1].removeprefix("--"): row.strip("| ").split(" | ") for row in rows if "--help-" not in row}
    assert sorted(cells) == sorted(vime_flags())
    assert all(len(row) == 4 and row[3] for row in cells.values())


def upstream_flags() -> dict[str, dict[str, str]]:
    return {name: dict(said) for group in read_flags().values() for name, said in group.items()}


def test_every_flag_that_is_said_to_be_here_is_here() -> None:
    """Megatron's and the router's tables included; and a flag that is not here has its reason."""
    catalogue = Catalogue()
    for name, said in upstream_flags().items():
        if name in vime_flags():
            assert not {"here", "why", "later"} & set(said), (
                f"--{name} is here under the same name; no reason is needed"
            )
            continue
        if said.get("owner"):
            assert name in catalogue.table(said["owner"]), name
        elif "here" in said:
            assert said["here"] in OF_THE_PARSER or catalogue.find(said["here"]) is not None, name
        else:
            assert said.get("why"), f"--{name} is not here any more, or never was; say why"


def test_flags_that_are_named_on_the_page_exist() -> None:
    page = (DOCS / "coming_from_slime_and_vime.md").read_text("utf-8")
    catalogue, theirs = Catalogue(), upstream_flags()
    named = {name for name in re.findall(r"--([a-z][a-z0-9-]+)", page) if not name.endswith("-")}
    ours = named - set(theirs) - OF_THE_PARSER
    assert sorted(name for name in ours if catalogue.find(name) is None) == []
