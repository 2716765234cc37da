"""Runs killed by SIGKILL before each of the things they do to the file system, one after the other."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.deaths import die_before, in_a_fork
from vime.loop.cadence import StopRule
from vime.loop.checkpoint import find_checkpoints, open_checkpoint
from vime.loop.keeper import CheckpointKeeper

LAST = 4


class Counting:
    """A trainer and a data source in one: both are at a step, and write it in two files and in a dictionary."""

    step = -1

    def save(self, path: Path) -> None:
        path.mkdir()
        for name in ("first", "second"):
            (path / name).write_text(str(self.step) * 100)

    def begin_save(self, path: Path) -> None:
        self._begun, self._begun_at = path, self.step

    def end_save(self, wait: bool) -> bool:
        now, self.step = self.step, self._begun_at
        self.save(self._begun)
        self.step = now
        return True

    def state(self) -> dict[str, Any]:
        return {"step": self.step}


def run(folder: Path, *, in_background: bool, again: bool) -> None:
    """Save after each step from where the folder says on. Args: again: once more over what is there."""
    found = find_checkpoints(folder)
    start = open_checkpoint(folder).rollout_id + 1 if found else 0
    both: Any = Counting()
    keeper = CheckpointKeeper(
        both, both, StopRule(), folder=folder, settings={}, keep_last=2, in_background=in_background
    )
    for step in range(start - again, LAST + 1):
        both.step = step
        keeper.save(step)
        keeper.settle(step, {"train/loss": float(step)})
    keeper.finish()


def run_and_die(folder: Path, before: int, **how: bool) -> bool:
    """`run`, killed before its n-th change of the file system. Returns: whether it was."""

    def dying() -> None:
        die_before(before)
        run(folder, **how)

    return in_a_fork(dying)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_run_killed_anywhere_leaves_a_whole_checkpoint_and_goes_on(
    tmp_path: Path, in_background: bool, again: bool
) -> None:
    run(tmp_path / "begun", in_background=in_background, again=False)
    if not again:  # else the last is written once more, over what is there
        (tmp_path / "begun" / f"rollout_{LAST:06d}").rename(tmp_path / "begun" / ".removed_rollout_000000")
    before, was_killed, newest = 0, True, set()
    while was_killed:
        folder = shutil.copytree(tmp_path / "begun", tmp_path / str(before))
        was_killed = run_and_die(folder, before, in_background=in_background, again=again)
        checkpoint = open_checkpoint(folder)
        assert not checkpoint.skipped
        newest.add(checkpoint.rollout_id)
        assert checkpoint.data_source == {"step": checkpoint.rollout_id}
        for name in ("first", "second"):
            assert (checkpoint.path / "trainer" / name).read_text() == str(checkpoint.rollout_id) * 100
        run(folder, in_background=in_background, again=False)
        assert open_checkpoint(folder).rollout_id == LAST
        before += 1
    assert newest == {LAST - 1, LAST} and before > 15
