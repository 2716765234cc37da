"""Finds the processes of a run, by kind, among the children of its driver."""

from __future__ import annotations

import contextlib
import random
import signal
import time

import psutil

WORDS = {
    "engine": ("vime.engine.vllm.launch", "tests.stub_engine"),
    "router": ("vime.engine.vllm.router",),
    "validator": ("vime.engine.vllm.router",),
    "rank": ("ray::TrainerWorker",),
    "grader": ("vime.rewards.worker",),
}


class RunProcesses:
    """Every process that a run was ever seen to have. Args: pid: of the driver."""

    def __init__(self, pid: int) -> None:
        self._driver = psutil.Process(pid)
        self.seen: dict[int, tuple[psutil.Process, tuple[str, ...]]] = {}
        """By pid, with the words of the command line."""

    def note(self) -> None:
        """Look at what is there now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in self._driver.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.seen[child.pid] = (child, tuple(child.cmdline()))

    def pick(self, kind: str, rng: random.Random) -> psutil.Process | None:
        """One process of a kind that lives now; None if there is none."""
        if kind == "driver":
            return self._driver if is_alive(self._driver) else None
        self.note()
        found = [process for process, words in self.seen.values() if self._is(kind, process, words)]
        return rng.choice(sorted(found, key=lambda process: process.pid)) if found else None

    def _is(self, kind: str, process: psutil.Process, words: tuple[str, ...]) -> bool:
        if not is_alive(process) or not any(word.startswith(WORDS[kind]) for word in words):
            return False
        try:
            parent = process.parent()
            of_same_program = parent is not None and parent.cmdline() == list(words)
        except psutil.NoSuchProcess:
            return False
        if kind in ("router", "validator"):
            return of_same_program == (kind == "validator")
        return not of_same_program  # the guard beside an engine is no engine

    def left(self, timeout_s: float, *, but: tuple[str, ...] = ()) -> list[str]:
        """Command lines of those that still live after so long. Args: but: beginnings of those that may."""
        deadline = time.monotonic() + timeout_s
        lines = [(process, " ".join(words).strip()[:120]) for process, words in self.seen.values()]
        watched = [(process, line) for process, line in lines if not line.startswith(but)]
        while alive := [line for process, line in watched if is_alive(process)]:
            if time.monotonic() > deadline:
                return alive
            time.sleep(0.2)
        return []

    def go_on(self) -> None:
        """Those that are stopped cannot see that their run has ended, nor end, before they run again."""
        for process, _ in self.seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_STOPPED:
                    process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill what still lives."""
        for process in [*(process for process, _ in self.seen.values()), self._driver]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs, or is stopped; a zombie does neither."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
