"""Every link of every Markdown page of the repository leads to a file and heading that exist."""

import re
import subprocess
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1[^\S\n]*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")


def markdown_files() -> list[Path]:
    """Those that git knows, or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    names = listed.stdout.splitlines() if listed.returncode == 0 else [str(p) for p in ROOT.glob("**/*.md")]
    return [ROOT / name for name in names if (ROOT / name).exists()]


def links(text: str) -> list[str]:
    """Targets of a page's links, those in code left out."""
    return _LINK.findall(_CODE.sub("", _FENCE.sub("", text)))


def anchors(text: str) -> set[str]:
    """The anchors GitHub makes of a page's headings."""
    found: dict[str, int] = {}
    result = set()
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*#*$", _FENCE.sub("", text), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        count = found.get(slug, 0)
        found[slug] = count + 1
        result.add(f"{slug}-{count}" if count else slug)
    return result


def problems(page: Path, text: str) -> list[str]:
    """What is wrong with the page's links, one sentence each."""
    wrong = []
    for target in links(text):
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            if parts.scheme not in ("http", "https", "mailto") or not (parts.netloc or parts.path):
                wrong.append(f"{target}: not an address")
            continue
        file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        if not file.exists():
            wrong.append(f"{target}: there is no {file}")
        elif parts.fragment and file.suffix == ".md":
            source = text if file == page else file.read_text("utf-8")
            if parts.fragment not in anchors(source):
                wrong.append(f"{target}: no such heading in {file}; there are {sorted(anchors(source))}")
    return wrong


@pytest.mark.parametrize("page", markdown_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert problems(page, page.read_text("utf-8")) == []


def test_the_check_finds_what_is_wrong(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "# A `b` c\n[x](#a-b-c) [y](other.md) [z](#nowhere) `[code](gone)`\n```\n[fence](gone)\n```\n[w](https://)\n"
    page.write_text(text)
    (tmp_path / "other.md").write_text("# Other\n## Other\n")
    assert anchors("# Other\n## Other\n") == {"other", "other-1"}
    assert [p.split(":")[0] for p in problems(page, text)] == ["#nowhere", "https"]
    assert problems(page, "[a](other.md#other-1)") == [] and problems(page, "[a](missing.md)") != []
