"""What the tests of loops that generate beside the training share: a trainer and a publisher that only take notes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vime.data.journal import Journal
from vime.data.journaled import JournaledSource
from vime.errors import TrainingError
from vime.loop.cadence import StopRule
from vime.loop.checkpoint import load_checkpoint, open_checkpoint
from vime.loop.keeper import CheckpointKeeper
from vime.loop.recorder import Recorder
from vime.loop.sync import Rollout, Stages
from vime.observability.progress import RunProgress
from vime.observability.run_folder import RunFolder
from vime.observability.writers import JsonlWriter
from vime.protocols import DataSource
from vime.types import Group, RolloutResult


class Notes:
    """Trainer and publisher at once, over a data source with its journal. A batch has a `rollout_id` and `prompts`.

    Args: source: what the journal, in `folder`, is of.
    """

    def __init__(self, folder: Path, source: DataSource, stop: StopRule | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.source = JournaledSource(source, Journal(folder / "journal.sqlite"), version=1, uses_finished=True)
        self.stop = stop or StopRule()
        self.calls: list[str] = []
        self.trained: list[list[Any]] = []
        self.version, self.num_running = 0, 0  # of what generates
        self.metrics: dict[str, float] = {}
        self.fail_training_at = -1

    def make_batch(self, rollout_id: int, groups: list[Group]) -> Any:
        raise NotImplementedError

    def train(self, batch: Any) -> dict[str, float]:
        if batch.rollout_id == self.fail_training_at:
            raise TrainingError("rank 0 died")
        self.calls.append(f"train {batch.rollout_id}")
        self.trained.append(batch.prompts)
        return {"train/loss": 1.0, "train/step": float(batch.rollout_id)}

    def publish(self, version: int) -> int:
        assert not self.num_running, "weights came while something was generated"
        self.calls.append(f"publish v{version}")
        self.version = version
        return version

    def evaluate(self, rollout_id: int) -> RolloutResult:
        self.calls.append(f"evaluate {rollout_id} at v{self.version}")
        return RolloutResult([], {"eval/heldout": 0.25})

    def save(self, path: Path) -> None:
        self.calls.append(f"save {int(path.parent.name.split('_')[2])}")
        path.mkdir()

    def load(self, path: Path) -> None:
        assert path.is_dir()

    def resume(self, folder: Path, rollout_id: int) -> None:
        """Go on from a checkpoint of the run in this folder."""
        trainer: Any = self
        load_checkpoint(open_checkpoint(folder / "checkpoints", rollout_id), trainer, self.source, self.stop)

    def stages(self, rollout: Rollout, checkpoints: Path | None) -> Stages:
        """With the real keeper of checkpoints. Args: checkpoints: their folder; None keeps none."""
        trainer: Any = self  # a loop asks no more of it
        keeper = CheckpointKeeper(
            trainer, self.source, self.stop, folder=checkpoints, settings={}, journaled=self.source
        )
        return Stages(rollout=rollout, trainer=trainer, publisher=self, make_batch=self.make_batch, checkpoints=keeper)


@contextmanager
def recording(folder: Path, num_rollout: int) -> Iterator[Recorder]:
    """A recorder whose metrics `rows_of` reads afterwards."""
    writer = JsonlWriter(folder / "metrics.jsonl")
    try:
        yield Recorder(RunFolder(folder), RunProgress(num_rollout), writer, keep_rollouts=False)
    finally:
        writer.close()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
