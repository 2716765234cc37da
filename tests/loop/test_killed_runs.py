"""Runs that are killed at any moment and resumed: every prompt once, by the journal and by the model itself."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.loop.killed_run import BATCH, NUM_PROMPTS
from vime.data.accounting import account_of
from vime.data.journal import Journal
from vime.loop.checkpoint import find_checkpoints

NUM_ROLLOUT = 12


def begin(folder: Path, loop: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.loop.killed_run", str(folder), "--loop", loop]
    with open(folder / "log", "ab") as log:
        return subprocess.Popen([*command, "--num-rollout", str(NUM_ROLLOUT)], stdout=log, stderr=log)


def kill_after(folder: Path, process: subprocess.Popen[bytes], seconds: float) -> None:
    """SIGKILL so long after it has begun to hand out prompts."""
    before = events(folder)
    deadline = time.monotonic() + 900
    while process.poll() is None and events(folder) <= before and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(seconds)
    process.kill()
    process.wait()


def events(folder: Path) -> int:
    path = folder / "ckpt" / "journal.sqlite"
    if not path.is_file():
        return 0
    try:
        journal = Journal.read(path)
    except Exception:  # it is being made
        return 0
    with_event = journal.meta().get("event", "0")
    journal.close()
    return int(with_event)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["sync", "overlapped"])
def test_no_prompt_is_skipped_or_trained_on_twice_however_often_a_run_is_killed(tmp_path: Path, loop: str) -> None:
    seed = random.randrange(10**6)
    moments = random.Random(seed)
    print(f"seed {seed}")
    for _ in range(2):
        kill_after(tmp_path, begin(tmp_path, loop), moments.uniform(0, 0.6))
        if (tmp_path / "ckpt" / "journal.sqlite").is_file():
            assert account_of(tmp_path / "ckpt" / "journal.sqlite").is_exact
    last = begin(tmp_path, loop)
    assert last.wait(timeout=900) == 0, (tmp_path / "log").read_text()

    found = account_of(tmp_path / "ckpt" / "journal.sqlite")
    assert found.is_exact, (found.lost, found.doubled)
    newest = find_checkpoints(tmp_path / "ckpt")[-1]
    model: list[list[Any]] = json.loads((newest / "trainer" / "model_3").read_text())
    assert len(model) == NUM_ROLLOUT * BATCH
    assert len({row[0] for row in model}) == len(model), "a group is in the weights twice"
    # The filter drops odd prompts and nothing else: the kept ones of each epoch are all there but those still out.
    assert all(row[1] % 2 == 0 for row in model)
    assert all(row[3] <= row[2] + 1 for row in model), "a version that was lost has sampled it"
    journal = Journal.read(tmp_path / "ckpt" / "journal.sqlite")
    in_weights = {row[0] for row in model}
    assert {life.group_id for life in journal.lives("stage = 'trained'")} == in_weights
    ended = in_weights | {life.group_id for life in journal.lives("stage = 'dropped'")}
    out = {life.group_id for life in journal.lives() if life.is_open}
    assert ended | out == set(range(max(ended) + 1)) | out, "a prompt before the last one is missing"
    assert max(ended) >= NUM_ROLLOUT * BATCH and NUM_PROMPTS < max(ended)
