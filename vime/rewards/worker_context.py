"""What a plain reward function gets as `config` in a grader process: the settings, without the live handles."""

from __future__ import annotations

from typing import Any

from vime.config import Config
from vime.errors import RewardError
from vime.protocols import RolloutContext


class _Absent:
    """Stands for a handle that only the rollout's own process has."""

    def __init__(self, name: str, path: str) -> None:
        self._message = (
            f"config.{name} is not there: {path} is a plain `def` and runs in a grader process; "
            f"write it as `async def` to use {name}"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RewardError(self._message)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        raise RewardError(self._message)


def worker_context(config: Config, path: str) -> RolloutContext:
    """The context of the function at `path`."""
    engines: Any = _Absent("engines", path)
    return RolloutContext(config, engines, _Absent("tokenizer", path), _Absent("reward", path))
