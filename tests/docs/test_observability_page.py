"""The example of docs/observability.md does what the page says."""

import asyncio
import re
from pathlib import Path
from typing import Any

from vime.observability.trace import seconds_outside_generation
from vime.types import Sample

PAGE = Path(__file__).resolve().parents[2] / "docs" / "observability.md"


def test_the_reward_adds_a_span_that_is_not_generation() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    sample = Sample(tokens=(1,), response=" 7", label="7")
    assert asyncio.run(names["reward"](None, sample)) == 1.0
    assert (sample.trace[0]["name"], sample.trace[0]["characters"]) == ("checker", 2)
    assert seconds_outside_generation(sample.trace) > 0
