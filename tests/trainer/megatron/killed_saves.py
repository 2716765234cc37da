"""What test_killed_saves.py runs: a process that imports the trainer once, and a fork of it for each run and death."""

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path

from tests.deaths import die_before, in_a_fork
from tests.trainer.conftest import make_batch_of
from vime.config import Config
from vime.loop.cadence import StopRule
from vime.loop.checkpoint import load_checkpoint, open_checkpoint
from vime.loop.keeper import CheckpointKeeper
from vime.platform import get_platform
from vime.trainer.megatron.patches.lean_import import lean_import

with lean_import():
    from vime.trainer.megatron.patches import cpu_shims
    from vime.trainer.megatron.trainer import MegatronTrainer

STEPS = 3


class Position:
    """As much of a data source as a checkpoint asks for."""

    step = -1

    def state(self):
        return {"step": self.step}

    def restore(self, state):
        self.step = state["step"]


def train(model, folder, out, *, in_background, arm=lambda: None):
    """Go on from the newest checkpoint to the last step, saving after each; losses by step go to `out`."""
    trainer = MegatronTrainer(
        Config(megatron={"lr": 1e-2}),
        hf_path=str(model),
        platform=get_platform("cpu"),
        rank=0,
        world_size=1,
        init_method=f"file://{out}.meet-{os.getpid()}",
        total_steps=10,
        writer=None,
    )
    source, stop, losses = Position(), StopRule(), {}
    if any(folder.glob("rollout_*")):
        load_checkpoint(open_checkpoint(folder), trainer, source, stop)
    keeper = CheckpointKeeper(
        trainer, source, stop, folder=folder, settings={}, keep_last=1, in_background=in_background
    )
    while source.step + 1 < STEPS:
        source.step += 1
        losses[source.step] = trainer.train(make_batch_of([9, 4, 17, 6], seed=source.step))["train/loss"]
        if source.step == 1:
            keeper.finish()  # there is a checkpoint to go on from
            arm()
        keeper.save(source.step)
        keeper.settle(source.step, {})
    keeper.finish()
    out.write_text(json.dumps(losses))
    trainer.close()


def main(model, scratch, in_background, first, every):
    """Kill runs before every `every`-th event and see how they go on; one line of JSON for each."""
    cpu_shims.install()  # imports more, which each fork would do anew
    run = partial(train, model, in_background=in_background)
    in_a_fork(partial(run, scratch / "straight", scratch / "want"))
    event, was_killed = first, True
    while was_killed:
        folder, out = scratch / str(event), scratch / "got"
        was_killed = in_a_fork(partial(run, folder, out, arm=partial(die_before, event)))
        checkpoint = open_checkpoint(folder)
        found = {"rollout": checkpoint.rollout_id, "step": checkpoint.data_source["step"]}
        in_a_fork(partial(run, folder, out))
        losses = {"want": json.loads((scratch / "want").read_text()), "got": json.loads(out.read_text())}
        left = sorted(path.name for path in folder.iterdir())
        print(json.dumps({"event": event, "killed": was_killed, "left": left, **found, **losses}), flush=True)
        shutil.rmtree(folder)
        event += every


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "background", int(sys.argv[4]), int(sys.argv[5]))
