"""Runs on a real file system that gets full, at every amount of space that is left: a clear end, and it goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

WHAT = ("/journal.sqlite", "checkpoint of rollout", "/metrics.json", "/rollouts/rollout_")
IN_ITS_OWN_MOUNTS = ["unshare", *([] if os.getuid() == 0 else ["--map-root-user"]), "--mount"]


def may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run([*IN_ITS_OWN_MOUNTS, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True)
    return tried.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="needs to mount a file system (Linux, user namespaces)")
def test_a_run_whose_disk_is_full_ends_with_that_and_goes_on_when_there_is_space(tmp_path: Path) -> None:
    (disk := tmp_path / "disk").mkdir()
    command = [*IN_ITS_OWN_MOUNTS, sys.executable, "-m", "tests.loop.full_disk", str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-5000:]
    *problems, last = json.loads(done.stdout.splitlines()[-1])
    assert last == "none"
    ended = [problem for problem in problems if problem != "none"]
    print("\n".join(ended))
    assert len(ended) > 5
    for problem in ended:  # which one it is depends on times
        assert "No space left on device" in problem or "the disk is full" in problem, problem
        assert any(what in problem for what in WHAT), problem
