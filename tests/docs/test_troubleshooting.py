"""The messages that docs/troubleshooting.md quotes are those of the source."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_quoted_message_is_one_of_ours() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(quoted) > 20
    # A message may be cut over lines of the source, and its values are written in braces.
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "vime").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    gone = {part for message in quoted for part in message.split("…") if part.strip() not in source}
    assert not gone, "no longer said"
