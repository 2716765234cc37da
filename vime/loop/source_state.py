"""The state of a data source as a checkpoint keeps it: JSON, and nothing that would come back as something else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vime.data.journaled import JournaledSource
from vime.errors import DataError
from vime.protocols import DataSource

_SHOWN = 80


def state_of(source: DataSource) -> dict[str, Any]:
    """What `source.state()` gives. Raises: DataError naming the source and the first value that JSON cannot keep."""
    state: Any = source.state()
    of = type(source.source if isinstance(source, JournaledSource) else source)
    name = f"{of.__module__}.{of.__qualname__}"
    if not isinstance(state, dict):
        raise DataError(f"data source {name}: state() gave {_shown(state)}, but must give a dictionary")
    for problem in _problems(state, "state()"):
        raise DataError(
            f"data source {name}: {problem}; a checkpoint is JSON: numbers, text, true, false, None, lists, and "
            "dictionaries whose keys are text"
        )
    return state


def _problems(value: Any, where: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                yield f"{where} has the key {_shown(key)}"
            yield from _problems(inner, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _problems(inner, f"{where}[{i}]")
    elif not isinstance(value, str | int | float | None):
        yield f"{where} is {_shown(value)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= _SHOWN else text[:_SHOWN] + '…'} of type {type(value).__name__}"
