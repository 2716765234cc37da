"""A run on fakes of engines and trainer, in a process of its own that a test kills: `python -m tests.loop.killed_run`.

Data buffer, journal, rollout function, loop and checkpoints are the real ones. The trainer's whole model is the list of
what it was trained on, so a checkpoint says which prompts are in its weights. Answers take a random time, which differs
from run to run; half of the groups are dropped by a filter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fakes import EOS, FakeEngines, char_tokenizer
from vime.config import CheckpointConfig, Config, DataConfig, RewardConfig, RolloutConfig
from vime.data.buffer import DataBuffer
from vime.data.prompt_set import Prompt
from vime.loop.cadence import Cadence, StopRule
from vime.loop.checkpoint import load_checkpoint, open_checkpoint
from vime.loop.keeper import CheckpointKeeper, remove_leftovers
from vime.loop.overlapped import run_overlapped
from vime.loop.recorder import Recorder
from vime.loop.sync import Stages, run_sync
from vime.observability.progress import RunProgress
from vime.observability.run_folder import RunFolder
from vime.observability.writers import JsonlWriter
from vime.orchestration.journal import with_journal
from vime.protocols import Completion, GenerateRequest, RolloutContext
from vime.rollout.stage import RolloutStage
from vime.types import Group, VersionSpan

NUM_PROMPTS, BATCH, N = 12, 3, 2
TOKENIZER = char_tokenizer()


class Trainer:
    """Its model is what it has learnt: [group_id, epoch, index, rollout_id, newest version]."""

    def __init__(self) -> None:
        self.model: list[list[int]] = []
        self.version = 0

    def train(self, batch: tuple[int, list[Group]]) -> dict[str, float]:
        rollout_id, groups = batch
        time.sleep(0.02)
        for group in groups:
            newest = max(span.version for sample in group.samples for span in sample.weight_versions)
            self.model.append([group.group_id, int(group.samples[0].label), rollout_id, newest])
        return {}

    def save(self, path: Path) -> None:
        path.mkdir()
        text = json.dumps(self.model)
        for part in range(4):  # a save takes time, and is killed in the middle of it, too
            (path / f"model_{part}").write_text(text)
            time.sleep(0.01)

    def load(self, path: Path) -> None:
        self.model = json.loads((path / "model_3").read_text())


class Engines(FakeEngines):
    """Answers after a random time, stamped with the version of the trainer's last publish."""

    version = 0

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        version = self.version
        await asyncio.sleep(random.uniform(0, 0.05))
        ids = TOKENIZER.encode("42" + EOS, add_special_tokens=False)
        made = Completion(
            token_ids=tuple(ids),
            log_probs=(-0.5,) * len(ids),
            finish_reason="stop",
            weight_versions=(VersionSpan(version, 0, len(ids)),),
        )
        return [made] * request.sampling.n


async def reward(config: RolloutContext, sample: Any) -> float:
    return float(sample.label)


def keep_even(config: RolloutContext, samples: list[Any]) -> bool:
    """A filter that drops the prompts of odd labels."""
    return int(samples[0].label) % 2 == 0


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--loop", choices=("sync", "overlapped"), required=True)
    parser.add_argument("--num-rollout", type=int, required=True)
    parser.add_argument("--keep-rollouts", action="store_true")
    given = parser.parse_args(argv)
    save = given.folder / "ckpt"
    config = Config(
        checkpoint=CheckpointConfig(save=str(save), load=str(save)),
        data=DataConfig(rollout_shuffle=True),
        rollout=RolloutConfig(
            rollout_batch_size=BATCH,
            n_samples_per_prompt=N,
            rollout_max_response_len=8,
            dynamic_sampling_filter_path="tests.loop.killed_run.keep_even",
        ),
        reward=RewardConfig(custom_rm_path="tests.loop.killed_run.reward"),
    )
    prompts = [Prompt(prompt=f"{i}", tokens=(2 + i,), label=str(i)) for i in range(NUM_PROMPTS)]
    inner = DataBuffer(prompts, n_samples_per_prompt=N, shuffle=True, seed=1)
    checkpoint = open_checkpoint(save) if list(save.glob("rollout_*")) else None
    start = 0 if checkpoint is None else checkpoint.rollout_id + 1
    remove_leftovers(save) if save.exists() else None
    source, _ = with_journal(config, inner, checkpoint, start, given.folder)
    trainer, stop, engines = Trainer(), StopRule(), Engines(lambda request, i: ([5], "stop"))
    made: Any = trainer
    if checkpoint is not None:
        load_checkpoint(checkpoint, made, source, stop)
    stage = RolloutStage(RolloutContext(config, engines, TOKENIZER, reward), source, {})
    keeper = CheckpointKeeper(made, source, stop, folder=save, settings={}, keep_last=3, journaled=source, hf_path=None)

    class Publisher:
        def __init__(self) -> None:
            self.metrics: dict[str, float] = {}

        def publish(self, version: int) -> int:
            engines.version = version
            return version

    def make_batch(rollout_id: int, groups: list[Group]) -> Any:
        return (rollout_id, groups), {}

    stages = Stages(rollout=stage, trainer=made, publisher=Publisher(), make_batch=make_batch, checkpoints=keeper)
    recorder = Recorder(
        RunFolder(given.folder / "run"),
        RunProgress(given.num_rollout),
        JsonlWriter(given.folder / "run" / "metrics.jsonl"),
        keep_rollouts=given.keep_rollouts,
    )
    loop = run_sync if given.loop == "sync" else run_overlapped
    cadence = Cadence(given.num_rollout, save_interval=2, saves=True)
    loop(stages, cadence, recorder, start=start, eval_before=False, stop=stop)


if __name__ == "__main__":
    main()
