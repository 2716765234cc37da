"""An earlier run's rollouts in the place of generation: the trainer alone, on the same samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vime.errors import ConfigError, EngineError
from vime.observability.rollout_file import read_rollout
from vime.protocols import DataSource
from vime.types import Group, RolloutResult


def rollout_data_path(text: str, rollout_id: int) -> Path:
    """The file of one rollout.

    Args: text: a run's folder, or a path with {rollout_id} in it (`{rollout_id:06d}` pads); without, one file for all.
    """
    path = Path(text.format(rollout_id=rollout_id))
    return path / "rollouts" / f"rollout_{rollout_id:06d}.parquet" if path.is_dir() else path


class ReplayedRollouts:
    """What a loop calls `rollout`, reading files. It generates nothing, so it cannot evaluate.

    Args:
        text: where the files are, see `rollout_data_path`.
        rollout_ids: those that will be asked for.
        subsample: the part of each rollout's groups to keep, above 0; the first ones.
    Raises: ConfigError naming the files that are not there.
    """

    def __init__(self, text: str, rollout_ids: Sequence[int], *, subsample: float | None = None) -> None:
        self._text, self._subsample = text, subsample
        if lacking := [p for p in (rollout_data_path(text, r) for r in rollout_ids) if not p.is_file()]:
            raise ConfigError(
                f"--load-debug-rollout-data {text}: {len(lacking)} of {len(rollout_ids)} files are not there, first "
                f"{lacking[0]}; check the path, --start-rollout-id and --num-rollout"
            )

    def generate(self, rollout_id: int) -> RolloutResult:
        """The groups of the file. Raises: DataError if it cannot be read."""
        groups: list[Group] = read_rollout(rollout_data_path(self._text, rollout_id))
        if self._subsample is not None:
            groups = groups[: math.ceil(self._subsample * len(groups))]
        return RolloutResult(groups)

    def call_off(self) -> None:
        """Nothing that takes long."""

    def evaluate(self, rollout_id: int) -> RolloutResult:
        """Refused. Raises: EngineError."""
        raise EngineError(f"rollout {rollout_id} cannot be evaluated: a run that replays rollouts starts no engines")


class NoPrompts(DataSource):
    """In the place of the data buffer, where a replay or an evaluation reads no prompts to train on."""

    def get_groups(self, n: int) -> list[Group]:
        """Refused. Raises: EngineError."""
        raise EngineError(f"a run that replays rollouts or only evaluates has no prompts; {n} were asked for")

    def put_back(self, groups: Sequence[Group]) -> None:
        """Refused. Raises: EngineError."""
        raise EngineError(f"a run that replays rollouts or only evaluates has no prompts; {len(groups)} came back")

    def state(self) -> dict[str, Any]:
        """Says that no prompts were read, so that no other run takes it for a place in its data."""
        return {"replayed": True}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Any run's state will do: the files say which samples come next."""

    def epoch_size(self) -> int | None:
        """Unknown."""
        return None
