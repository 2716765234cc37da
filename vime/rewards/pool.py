"""Grader processes that may be killed: one that hangs, crashes or eats memory costs its sample and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vime.errors import DataError, RewardError
from vime.rewards import QUICK
from vime.rewards.grade import CRASHED, TIMEOUT, VERDICTS, Grade

logger = logging.getLogger(__name__)

_START_S = 60.0  # a worker imports sympy for the first time on a busy machine
_MAX_ANSWER_BYTES = 1 << 16
# A grader sees model output and may be led to run it, so the run's keys and tokens do not enter its environment.
_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "VIRTUAL_ENV")


class GraderPool:
    """Grades responses in worker processes, one at a time each.

    Workers start when they are first needed and are replaced when they were killed. The pool belongs to no event
    loop: `grade` may be awaited from one loop today and from another tomorrow. `close` it at the end.

    Args:
        num_workers: processes at most.
        timeout_s: seconds one response may take; then its worker is killed and the verdict is "timeout".
        memory_limit_bytes: address space of a worker.
    """

    def __init__(self, num_workers: int = 1, timeout_s: float = 10.0, memory_limit_bytes: int = 2 << 30) -> None:
        if num_workers < 1 or timeout_s <= 0:
            raise ValueError(f"a grader pool needs workers and time, got {num_workers} and {timeout_s} s")
        self._timeout_s = timeout_s
        self._memory_limit_bytes = memory_limit_bytes
        # One thread per worker waits on its pipe. Last in, first out: few workers start when few are needed.
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="grader")
        self._places: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._places.put(None)
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._closed = False

    async def grade(self, name: str, response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> Grade:
        """The grade of one response by the grader called `name` (of REWARDS, or a dotted path).

        Never raises for what the response or the grader does: verdicts "timeout" and "crashed" say it, with score 0.
        Raises: RewardError if the grader cannot be loaded or the pool is closed; DataError if label or metadata
        cannot be sent as JSON.
        """
        quick = QUICK.get(name)
        if quick is not None and (decided := quick(response, label, metadata or {})) is not None:
            return decided
        request = {"grade": name, "response": response, "label": label, "metadata": dict(metadata or {})}
        request["kill_after_s"] = 2 * self._timeout_s + 5
        try:
            payload = json.dumps(request)
        except (TypeError, ValueError) as error:
            raise DataError(f"label and metadata go to the {name} grader as JSON, which fails: {error}") from error
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._grade, name, payload)

    def close(self) -> None:
        """Kill all workers. Grades still being awaited raise RewardError."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in workers:
            worker.release()

    def _grade(self, name: str, payload: str) -> Grade:
        worker = self._places.get()
        try:
            worker = self._ready(worker, name)
            try:
                answer = worker.ask(payload, self._timeout_s)
                if not answer.get("fatal"):
                    return self._read_grade(answer, name)
                grade = CRASHED
                logger.warning("grader %s raised %s; its worker is replaced", name, answer.get("error"))
            except TimeoutError:
                logger.warning("grader %s took more than %g s for a response and was killed", name, self._timeout_s)
                grade = TIMEOUT
            except _WorkerFailed as failure:
                logger.warning("grader %s: %s; its worker is replaced", name, failure)
                grade = CRASHED
            self._check_open()
            self._discard(worker)
            worker = None
            return grade
        finally:
            self._places.put(worker)

    def _read_grade(self, answer: Mapping[str, Any], name: str) -> Grade:
        if "error" in answer:
            logger.warning("grader %s raised %s", name, answer["error"])
            return CRASHED
        score, verdict = answer.get("score"), answer.get("verdict")
        if not isinstance(score, (int, float)) or not math.isfinite(score) or verdict not in VERDICTS:
            raise _WorkerFailed(f"it answered {str(answer)[:200]}")
        return Grade(float(score), verdict)

    def _ready(self, worker: _Worker | None, name: str) -> _Worker:
        """A live worker that has `name` loaded. Raises: RewardError."""
        self._check_open()
        if worker is not None and not worker.is_alive():  # killed from outside while it was idle
            self._discard(worker)
            worker = None
        if worker is None:
            worker = _Worker(self._memory_limit_bytes)
            with self._lock:
                self._workers.add(worker)
            self._check_open()
        if name not in worker.loaded:
            try:
                answer = worker.ask(json.dumps({"load": name}), _START_S)
            except (TimeoutError, _WorkerFailed) as error:
                words = worker.last_words()
                self._discard(worker)
                self._check_open()
                raise RewardError(f"the process for grader {name!r} does not start: {error!r}\n{words}") from error
            if "error" in answer:
                raise RewardError(f"grader {name!r} cannot be loaded: {answer['error']}")
            worker.loaded.add(name)
        return worker

    def _discard(self, worker: _Worker) -> None:
        worker.kill()
        worker.release()
        with self._lock:
            self._workers.discard(worker)

    def _check_open(self) -> None:
        if self._closed:
            with self._lock:
                workers = list(self._workers)
            for worker in workers:
                worker.kill()
            raise RewardError("the grader pool is closed")


class _WorkerFailed(Exception):
    """The worker died or answered something that is no answer."""


class _Worker:
    """One grader process with its pipes; used by one thread at a time."""

    def __init__(self, memory_limit_bytes: int) -> None:
        environment = {key: os.environ[key] for key in _ENVIRONMENT if key in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path) or "."
        environment["OMP_NUM_THREADS"] = "1"
        self._stderr = tempfile.TemporaryFile()
        # Its own session, so that whatever a grader starts dies with it. The worker is not forked from this process,
        # which may hold a CUDA context and gigabytes, but started afresh.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vime.rewards.worker", str(memory_limit_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stdout, False)
        self._kill_lock = threading.Lock()
        self._is_killed = False
        self.loaded: set[str] = set()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, payload: str, timeout_s: float) -> dict[str, Any]:
        """Send one request and wait for its answer. Raises: TimeoutError, _WorkerFailed."""
        deadline = time.monotonic() + timeout_s
        pending = memoryview(payload.encode() + b"\n")
        received = bytearray()
        try:
            while pending:
                self._wait(self._stdin, select.POLLOUT, deadline)
                pending = pending[os.write(self._stdin, pending) :]
            while not received.endswith(b"\n"):
                self._wait(self._stdout, select.POLLIN, deadline)
                part = os.read(self._stdout, _MAX_ANSWER_BYTES)
                received += part
                if not part:
                    raise _WorkerFailed(f"its process ended{self._exit_words()}")
                if len(received) > _MAX_ANSWER_BYTES:
                    raise _WorkerFailed("it answered without end")
            answer = json.loads(received)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise _WorkerFailed(f"its process ended{self._exit_words()} ({error.strerror})") from error
        except ValueError as error:
            raise _WorkerFailed(f"it answered {bytes(received[:200])!r}") from error
        if not isinstance(answer, dict):
            raise _WorkerFailed(f"it answered {answer!r}")
        return answer

    def last_words(self) -> str:
        """The end of what the process wrote to its error output."""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - 2000))
        return self._stderr.read().decode(errors="replace").strip()

    def kill(self) -> None:
        """End the process and everything it started; harmless when repeated, and from any thread."""
        with self._kill_lock:
            if not self._is_killed:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._is_killed = True

    def release(self) -> None:
        """Close the pipes of a killed worker that no thread reads any more."""
        for file in (self._process.stdin, self._process.stdout, self._stderr):
            if file is not None:
                file.close()

    @staticmethod
    def _wait(fd: int, event: int, deadline: float) -> None:
        poll = select.poll()  # not select(): descriptors above 1023 are usual in a server
        poll.register(fd, event)
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not poll.poll(remaining * 1000):
            raise TimeoutError

    def _exit_words(self) -> str:
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return ""
        return f" by signal {-code}" if code < 0 else f" with exit code {code}"
