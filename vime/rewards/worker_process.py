"""The pool's end of one grader process: pipes, deadlines, and an end that nothing it started survives."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import psutil

_MAX_ANSWER_BYTES = 1 << 20
_KILL_ROUNDS = 20  # of looking for processes that came while others were killed
# A grader sees model output and may be led to run it, so the run's keys and tokens do not enter its environment.
_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "VIRTUAL_ENV")


class WorkerFailed(Exception):
    """The worker died or answered something that is no answer."""


class WorkerProcess:
    """One `vime.rewards.worker` with its pipes; used by one thread at a time.

    Args: memory_limit_bytes: address space it may have.
    """

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
        self._num_asked = 0
        self.loaded: set[str] = set()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def is_fit(self) -> bool:
        """Whether it lives and has said nothing that it was not asked for."""
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        return self._process.poll() is None and not poll.poll(0)

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one request and wait for its answer. Raises: TimeoutError, WorkerFailed."""
        deadline = time.monotonic() + timeout_s
        self._num_asked += 1
        pending = memoryview(json.dumps({**request, "id": self._num_asked}).encode() + b"\n")
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
                    raise WorkerFailed(f"its process ended{self._exit_words()}")
                if len(received) > _MAX_ANSWER_BYTES:
                    raise WorkerFailed("it answered without end")
            answer = json.loads(received)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise WorkerFailed(f"its process ended{self._exit_words()} ({error.strerror})") from error
        except (ValueError, RecursionError) as error:
            raise WorkerFailed(f"it answered {bytes(received[:200])!r}") from error
        if not isinstance(answer, dict) or answer.get("id") != self._num_asked:
            raise WorkerFailed(f"it answered {str(answer)[:200]}")
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
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    self._kill_descendants()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._is_killed = True

    def release(self) -> None:
        """Close the pipes of a killed worker that no thread reads any more."""
        for file in (self._process.stdin, self._process.stdout, self._stderr):
            if file is not None:
                file.close()

    def _kill_descendants(self) -> None:
        """Processes that left the worker's session stay its descendants: the worker adopts their orphans."""
        worker = psutil.Process(self._process.pid)
        os.kill(self._process.pid, signal.SIGSTOP)
        for _ in range(_KILL_ROUNDS):
            living = [p for p in worker.children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
            if not living:
                return
            for process in living:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

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
