"""Lanes: cores of their own and an engine that outlives the runs, one run at a time; several lanes side by side."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_STOP_TIMEOUT_S = 90.0


class LaneFailed(RuntimeError):
    """A lane's engine did not start."""


class Lanes:
    """Runs jobs in `count` lanes. Use as a context manager: leaving it ends whatever it started.

    Args:
        count: lanes; the cores that this process may use are shared out among them.
        model: checkpoint whose architecture the engines serve; each run brings its own weights.
        out: folder of logs and keys.
    """

    def __init__(self, count: int, model: Path, out: Path) -> None:
        self._model, self._out = model, out
        self._cores = shares_of_cores(sorted(os.sched_getaffinity(0)), count)
        self._jobs: queue.Queue[Callable[[Sequence[str]], None] | None] = queue.Queue()
        self._running: set[subprocess.Popen[Any]] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._lane, args=(k,), name=f"lane-{k}") for k in range(count)]

    def __enter__(self) -> Lanes:
        """Start the lanes; their engines take some twenty seconds, in which this process may do something else."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
            running = list(self._running)
        for process in running:
            process.send_signal(signal.SIGTERM)
        self._give_up()
        for thread in self._threads:
            thread.join()

    def do(self, jobs: Sequence[Callable[[Sequence[str]], None]]) -> None:
        """Do all jobs, each in the first lane that is free, and wait for them. Called once.

        A job is given the flags that lead a run to the lane's engine; it runs on the lane's cores.
        Raises: what a job or a lane raised first.
        """
        for job in jobs:
            self._jobs.put(job)
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            while thread.is_alive():  # a join without end would keep ctrl-C waiting
                thread.join(0.5)
        if self._errors:
            raise self._errors[0]

    def train(self, *flags: str, log: Path, program: str = "train.py") -> int:
        """A program on the caller's cores; its exit code. What it says goes to a file."""
        with log.open("wb") as words:
            process = self._start(
                [sys.executable, program, "--platform", "cpu", *flags], stdout=words, stderr=subprocess.STDOUT
            )
            return self._wait(process)

    def _start(self, command: Sequence[str], **streams: Any) -> subprocess.Popen[Any]:
        with self._lock:
            if self._closed:
                raise LaneFailed("the benchmark is ending")
            process = subprocess.Popen(command, cwd=ROOT, env=_environment(), stdin=subprocess.DEVNULL, **streams)
            self._running.add(process)
            return process

    def _wait(self, process: subprocess.Popen[Any]) -> int:
        try:
            return process.wait()
        finally:
            with self._lock:
                self._running.discard(process)

    def _lane(self, k: int) -> None:
        os.sched_setaffinity(0, self._cores[k])  # of this thread, and of what it starts
        server: subprocess.Popen[Any] | None = None
        try:
            server, flags = self._engine(k)
            while (job := self._jobs.get()) is not None:
                job(flags)
        except BaseException as error:
            self._errors.append(error)
            self._give_up()
        finally:
            if server is not None:
                server.send_signal(signal.SIGTERM)
                try:
                    server.wait(_STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    server.kill()
                self._wait(server)

    def _give_up(self) -> None:
        """Take what is left in the queue out of it, and end every lane behind its present job."""
        with suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)

    def _engine(self, k: int) -> tuple[subprocess.Popen[Any], list[str]]:
        """The engine of a lane, ready; the flags that lead a run to it."""
        command, flags = self._engine_command(k)
        server = self._start(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert server.stdout is not None
        while b"ready" not in (line := server.stdout.readline()):
            if not line:
                self._wait(server)
                raise LaneFailed(f"an engine did not start; see {self._out / f'engine_{k}.log'}")
        return server, flags

    def _engine_command(self, k: int) -> tuple[list[str], list[str]]:
        """`vime engine`, and the flags that lead a run to it."""
        from vime.engine.vllm.processes import free_port

        key, log, port = self._out / f"engine_{k}.key", self._out / f"engine_{k}.log", str(free_port())
        command = [
            *(sys.executable, "-m", "vime.cli.main", "engine", "--hf-checkpoint", str(self._model)),
            *("--platform", "cpu", "--port", port, "--key-file", str(key), "--log-file", str(log)),
            *("--rollout-max-context-len", "16"),
        ]
        where = ("--rollout-external-engine-addrs", f"127.0.0.1:{port}")
        return command, [*where, "--rollout-external-engine-key-file", str(key)]


def shares_of_cores(cores: Sequence[int], count: int) -> list[list[int]]:
    """The cores of each lane: as many each as there are, the same ones for several lanes where there are too few."""
    each = max(len(cores) // count, 1)
    return [[cores[(k * each + i) % len(cores)] for i in range(each)] for k in range(count)]


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
