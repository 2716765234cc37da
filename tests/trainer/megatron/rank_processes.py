"""Processes that run cases of the parallel matrix one after the other, watched: each case has its own time limit.

What hangs or dies is ended together with its whole group and is that case's result; a new group goes on with the rest.
"""

import os
import pickle
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import vime

LIMIT_S = 300.0
_GRACE_S = 10.0  # that the other ranks have to say why they failed, too
_POLL_S = 0.05
WORKER = (sys.executable, "-W", "ignore", str(Path(__file__).with_name("rank_worker.py")))


def result_file(folder, case, world_size, rank):
    """Where a rank leaves what it found."""
    return folder / f"result {case} {world_size}-{rank}.pkl"


@dataclass
class Outcome:
    """What a case gave."""

    ranks: list[dict] = field(default_factory=list)
    """What each rank found; empty where it failed."""
    failure: str = ""
    seconds: float = 0.0


class Ranks:
    """`world_size` processes that run `cases` in order; started at the first look, ended by `close`.

    Args:
        folder: for results, logs and whatever the cases write.
        worker, clock: the program and its time, for tests of this class.
    """

    def __init__(
        self, folder, world_size, cases, *, platform="cpu", limit_s=LIMIT_S, worker=WORKER, clock=time.monotonic
    ):
        self._folder, self._world_size, self._cases = Path(folder), world_size, list(cases)
        self._platform, self._limit_s, self._worker = platform, limit_s, worker
        self._clock = clock
        self._processes: list[subprocess.Popen] = []
        self._logs: list[Path] = []
        self._starts = 0

    def start(self):
        """Start processes for the cases that are left."""
        self._starts += 1
        name = f"{self._world_size} ranks, start {self._starts}"
        (self._folder / f"{name}.pkl").write_bytes(pickle.dumps(self._cases))
        path = os.pathsep.join([str(Path(vime.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._logs = [self._folder / f"{name}, rank {rank}.log" for rank in range(self._world_size)]
        for rank, log in enumerate(self._logs):
            words = [rank, self._world_size, self._folder, f"{name}.pkl", self._platform, self._limit_s]
            with log.open("wb") as out:
                self._processes.append(
                    subprocess.Popen([*self._worker, *map(str, words)], env=env, stdout=out, stderr=subprocess.STDOUT)
                )

    def close(self):
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._processes = []

    def outcomes(self):
        """(case, Outcome) of every case, in order, as they come."""
        try:
            while self._cases:
                if not self._processes:
                    self.start()
                case, start = self._cases.pop(0), self._clock()
                outcome = self._wait(case, start)
                outcome.seconds = self._clock() - start
                if outcome.failure:
                    self.close()
                yield case, outcome
        finally:
            self.close()

    def _wait(self, case, start):
        files = [result_file(self._folder, case, self._world_size, rank) for rank in range(self._world_size)]
        found: dict[int, dict] = {}
        deadline = start + self._limit_s
        while True:
            ended = [process.poll() is not None for process in self._processes]
            for rank, file in enumerate(files):
                if rank not in found and file.exists():
                    found[rank] = pickle.loads(file.read_bytes())
                    file.unlink()
            failed = {rank: result["failed"] for rank, result in found.items() if "failed" in result}
            dead = [rank for rank, gone in enumerate(ended) if gone and rank not in found]
            if len(found) == self._world_size and not failed:
                return Outcome([found[rank] for rank in range(self._world_size)])
            if failed or dead:
                deadline = min(deadline, self._clock() + _GRACE_S)
            if len(found) + len(dead) == self._world_size or self._clock() > deadline:
                return Outcome(failure=self._failure(failed, dead, set(range(self._world_size)) - found.keys()))
            time.sleep(_POLL_S)

    def _failure(self, failed, dead, silent):
        """Why a case has no result, in one text: the last lines first."""
        if failed:
            errors = [f"rank {rank}: {text.strip().splitlines()[-1]}" for rank, text in sorted(failed.items())]
            return "\n".join([*errors, failed[min(failed)]])
        rank = min(dead or silent)
        what = f"ended with {self._processes[rank].returncode}" if dead else f"gave nothing in {self._limit_s:.0f} s"
        return f"rank {rank} {what}: {self._logs[rank].read_text(errors='replace')[-4000:]}"
