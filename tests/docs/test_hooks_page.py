"""The examples of docs/hooks.md are hooks that pass the check made at start."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from vime.config.hooks import load_hook

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hooks.md"


@pytest.mark.parametrize(
    ("name", "parameters"), [("reward", ("config", "sample")), ("generate", ("config", "sample", "sampling_params"))]
)
def test_the_example_has_the_parameters_that_are_checked(
    name: str, parameters: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = [block for block in blocks if f"async def {name}(" in block]
    (tmp_path / f"page_{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    try:
        assert callable(load_hook(f"page_{name}.{name}", parameters, is_async=True))
    finally:
        sys.modules.pop(f"page_{name}", None)
