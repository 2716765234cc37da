"""A real trainer killed by SIGKILL at what its checkpoint does to the file system: the one before it goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.conftest import write_model


def kill_and_go_on(tmp_path, how, *, first, every):
    """The lines of killed_saves.py."""
    write_model(tmp_path / "model", "qwen3")
    command = [sys.executable, "-W", "ignore", "-m", "tests.trainer.megatron.killed_saves"]
    done = subprocess.run(
        [*command, str(tmp_path / "model"), str(tmp_path), how, str(first), str(every)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def assert_all_went_on(lines):
    for line in lines:
        # With the last checkpoint there, the run has nothing left to do: what it was removing, it removes no more.
        may_stay = {"rollout_000001", ".removed_rollout_000001"} if line["killed"] and line["rollout"] == 2 else set()
        *older, newest = line["left"]
        assert line["rollout"] == line["step"] and newest == "rollout_000002" and set(older) <= may_stay, line
        assert set(line["got"]) == {str(step) for step in range(line["rollout"] + 1, 3)}, line
        assert all(loss == line["want"][step] for step, loss in line["got"].items()), "not the losses of a straight run"


def test_a_trainer_killed_while_it_saves_goes_on_from_a_whole_checkpoint(tmp_path):
    lines = kill_and_go_on(tmp_path, "background", first=6, every=25)
    assert len(lines) > 1 and {line["rollout"] for line in lines} >= {0, 2}
    assert_all_went_on(lines)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["background", "waiting"])
def test_a_trainer_killed_at_any_moment_goes_on_from_a_whole_checkpoint(tmp_path, how):
    lines = kill_and_go_on(tmp_path, how, first=0, every=1)
    assert len(lines) > 30 and {line["rollout"] for line in lines} == {0, 1, 2}
    assert_all_went_on(lines)
