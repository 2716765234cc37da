"""One round: the run is started, its processes are hit, and it is resumed until it is done."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.chaos import task
from tests.chaos.plan import Kill, Plan
from tests.chaos.victims import RunProcesses, is_alive

SILENCE_S = 300.0
"""A run that writes neither a line nor a step for so long hangs."""
_MAX_STARTS = 12
_WRONG_SETTINGS = 2  # exit code
_IS_UP = "start took"  # what a run says before its first rollout
_LEFT_S = 60.0
_RAYS_OWN = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")  # notice minutes later that their node is gone
_LOOK_S = 0.05

# Words of which a run that ended by itself must say one on a line of its own: who died, or that it was interrupted.
_WHO = "engine|router|rank|worker|grader|process|Ray"
CAUSE = re.compile(rf"^vime: \w+: (?:(?!^vime: ).)*({_WHO})", re.M | re.I | re.S)


@dataclass
class Result:
    """What came of a round."""

    plan: Plan
    run_dir: Path
    num_starts: int = 0
    hits: list[str] = field(default_factory=list)
    """The signals that were sent."""
    without_cause: list[str] = field(default_factory=list)
    """Ends of the run that nobody could explain, with the last lines; a hang is one."""
    faults: list[str] = field(default_factory=list)
    """What else was wrong."""
    finished: bool = False


class Attempt:
    """One start of the round's run. Its output goes to a file."""

    def __init__(self, plan: Plan, folder: Path, run_dir: Path, number: int) -> None:
        self.log = run_dir.parent / f"{run_dir.name}.attempt{number}.log"
        self._metrics = run_dir / "metrics.jsonl"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, plan.program, *task.flags(plan, folder, run_dir)],
                cwd=task.ROOT,
                env=task.environment(plan),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes = RunProcesses(self.process.pid)
        self._progress: Any = None
        self._is_up = False
        self._steps = self._steps_at = 0
        self._since = time.monotonic()

    def steps(self) -> int:
        """Steps of the run so far, those of earlier starts included: the highest one plus 1."""
        size = self._metrics.stat().st_size if self._metrics.exists() else 0
        if size != self._steps_at:
            self._steps = max((record["step"] + 1 for record in read_metrics(self._metrics)), default=0)
            self._steps_at = size
        return self._steps

    def has_reached(self, rollout: int) -> bool:
        """Whether this start has come so far: -1 is the start itself, 0 the first rollout that follows it."""
        if rollout < 0:
            return True
        self._is_up = self._is_up or _IS_UP in self.output()
        return self._is_up and self.steps() >= rollout

    def hangs(self) -> bool:
        """Whether nothing was written for too long."""
        sizes = [path.stat().st_size if path.exists() else 0 for path in (self.log, self._metrics)]
        if sizes != self._progress:
            self._progress, self._since = sizes, time.monotonic()
        return time.monotonic() - self._since > SILENCE_S

    def output(self) -> str:
        """All of it so far."""
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = 12) -> str:
        """The end of the output."""
        return "\n".join(self.output().rstrip().splitlines()[-lines:])


def play(plan: Plan, folder: Path, run_dir: Path) -> Result:
    """Play a round. Args: folder: of the task; run_dir: of the run, not there yet."""
    result = Result(plan, run_dir)
    pending, rng = list(plan.kills), random.Random(f"which {plan.seed}")
    stop_noting = threading.Event()
    while result.num_starts < _MAX_STARTS:
        result.num_starts += 1
        attempt = Attempt(plan, folder, run_dir, result.num_starts)
        noting = threading.Thread(target=_note, args=(attempt.processes, stop_noting, attempt.process), daemon=True)
        noting.start()
        driver_was_hit = _live_through(attempt, pending, rng, result)
        code = attempt.process.wait()
        noting.join()
        attempt.processes.go_on()
        if left := attempt.processes.left(_LEFT_S, but=_RAYS_OWN):
            result.faults.append(f"start {result.num_starts} left processes behind: {'; '.join(left)}")
            attempt.processes.end()
        if code == 0:
            result.finished = True
            return result
        if code == _WRONG_SETTINGS:
            raise SystemExit(f"the round cannot be played: {attempt.output()}")
        if not driver_was_hit and not CAUSE.search(attempt.output()):
            result.without_cause.append(f"start {result.num_starts} ended with {code}:\n{attempt.tail()}")
        if result.without_cause and "hangs" in result.without_cause[-1]:
            return result
    result.without_cause.append(f"the run was not done after {_MAX_STARTS} starts:\n{attempt.tail()}")
    return result


def _live_through(attempt: Attempt, pending: list[Kill], rng: random.Random, result: Result) -> bool:
    """Until the process ends, send the signals that are due. Returns: whether the driver was killed by one."""
    due: tuple[Kill, float] | None = None
    thaws: list[tuple[float, psutil.Process]] = []
    while attempt.process.poll() is None:
        now = time.monotonic()
        for at, process in [thaw for thaw in thaws if thaw[0] <= now]:
            thaws.remove((at, process))
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        if due is None and pending and attempt.has_reached(pending[0].rollout):
            due = (pending[0], now + pending[0].delay_s)
        if due is not None and now >= due[1]:
            kill = due[0]
            # A process that is not there yet is waited for; one that no run has (any more) must not stop the round.
            if (victim := attempt.processes.pick(kill.victim, rng)) is not None:
                pending.pop(0)
                due = None
                if _hit(victim, kill, result) and kill.thaw_s is not None:
                    thaws.append((now + kill.thaw_s, victim))
                elif kill.victim == "driver" and kill.signal == "KILL":
                    attempt.process.wait()
                    return True
        if attempt.hangs():
            result.without_cause.append(f"start {result.num_starts} hangs:\n{attempt.tail()}")
            attempt.processes.note()
            attempt.processes.end()
            attempt.process.wait()
            return True
        time.sleep(_LOOK_S)
    return False


def _hit(victim: psutil.Process, kill: Kill, result: Result) -> bool:
    """Send the signal. Returns: whether there was somebody to take it."""
    try:
        victim.send_signal(signal.SIGKILL if kill.signal == "KILL" else signal.SIGSTOP)
    except psutil.NoSuchProcess:
        return False
    result.hits.append(f"start {result.num_starts}: {kill} (pid {victim.pid})")
    return True


def _note(processes: RunProcesses, stop: threading.Event, driver: subprocess.Popen[bytes]) -> None:
    """Keep the list of the run's processes up to date, for what it may leave behind."""
    while driver.poll() is None and not stop.wait(0.5):
        processes.note()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a metrics.jsonl."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


__all__ = ["Result", "is_alive", "play", "read_metrics"]
