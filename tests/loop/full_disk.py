"""Runs on a small file system that gets full: `unshare -rm python -m tests.loop.full_disk FOLDER` mounts it there.

A run is let to its fourth rollout, then all but some KiB are taken from it. It goes on until something cannot be
written; what it left is looked at, the space is given back, and it goes on to its end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from pyarrow.parquet import read_table

from tests.loop import killed_run
from vime.data.accounting import account_of
from vime.loop.checkpoint import find_checkpoints, open_checkpoint

DISK_BYTES = 4 << 20
BEGUN, NUM_ROLLOUT = 4, 12


def run(folder: Path, loop: str, num_rollout: int) -> str | None:
    """In a process of its own. Returns: the OSError that ended it; None if it went to its end."""
    said, says = os.pipe()
    if os.fork() == 0:
        problem = "it failed otherwise"
        try:
            argv = [str(folder), "--loop", loop, "--num-rollout", str(num_rollout), "--keep-rollouts"]
            killed_run.main(argv)
            problem = ""
        except OSError as error:
            problem = str(error)
        finally:
            os.write(says, problem.encode())
            sys.stderr.flush()
            os._exit(0)
    os.close(says)
    with open(said) as file:
        problem = file.read()
    os.wait()
    return problem or None


def look(folder: Path) -> list[int]:
    """All that a run has left is whole. Returns: the steps it has measured."""
    partial = [p.name for p in folder.rglob("*") if "partial" in p.name]
    assert not partial, partial
    assert account_of(folder / "ckpt" / "journal.sqlite").is_exact
    assert not open_checkpoint(folder / "ckpt").skipped
    for path in (folder / "run" / "rollouts").iterdir():
        assert read_table(path).num_rows == killed_run.BATCH * killed_run.N
    return [json.loads(line)["step"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def fill(folder: Path, free_bytes: int) -> Path:
    """Take all of a file system but so much. Returns: the file that holds the rest."""
    filler = folder / "filler"
    free = shutil.disk_usage(folder).free
    filler.write_bytes(bytes(free - free_bytes))
    return filler


def main() -> None:
    disk = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)], check=True)
    free, was_full, problems = 0, True, []
    while was_full:
        for loop in ("sync", "overlapped"):
            folder = disk / f"{free}_{loop}"
            folder.mkdir()
            assert run(folder, loop, BEGUN) is None
            filler = fill(disk, free)
            problem = run(folder, loop, NUM_ROLLOUT)
            was_full = problem is not None
            steps = look(folder)
            assert steps == list(range(len(steps))) and len(steps) >= BEGUN, steps
            problems.append(problem or "none")
            filler.unlink()
            assert run(folder, loop, NUM_ROLLOUT) is None
            unsaid = set(range(NUM_ROLLOUT)) - set(look(folder))
            assert len(unsaid) <= 1, "a step that was saved before there was no room for its metrics"
            newest = find_checkpoints(folder / "ckpt")[-1]
            model = json.loads((newest / "trainer" / "model_3").read_text())
            assert len({row[0] for row in model}) == len(model) == NUM_ROLLOUT * killed_run.BATCH
            shutil.rmtree(folder)
        free += 24 << 10
    print(json.dumps(problems))


if __name__ == "__main__":
    main()
