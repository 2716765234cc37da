"""Grader processes that may be killed: one that hangs, crashes or eats memory costs its sample and nothing else."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import logging
import math
import pickle
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from vime.errors import DataError, RewardError
from vime.rewards import REWARDS
from vime.rewards.grade import CRASHED, TIMEOUT, VERDICTS, Grade, Verdict
from vime.rewards.worker_process import WorkerFailed, WorkerProcess

logger = logging.getLogger(__name__)

_STARTS = 3  # of a process that ends while it loads a grader: somebody may have killed it
_START_S = 300.0  # a worker imports sympy for the first time on a busy machine


@dataclass(frozen=True, slots=True)
class CallResult:
    """What became of a call in a worker: its value, or the error that it raised, or the verdict of its failure."""

    value: Any = None
    error: str | None = None
    verdict: Verdict | None = None


class GraderPool:
    """Grades responses in worker processes, one at a time each.

    Workers start when they are first needed and are replaced when they were killed. The pool belongs to no event
    loop: `grade` and `call` may be awaited from one loop today and from another tomorrow. `close` it at the end.

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
        self._places: queue.LifoQueue[WorkerProcess | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._places.put(None)
        self._lock = threading.Lock()
        self._workers: set[WorkerProcess] = set()
        self._closed = False

    @property
    def timeout_s(self) -> float:
        """Seconds one response may take."""
        return self._timeout_s

    async def grade(self, name: str, response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> Grade:
        """The grade of one response by the grader called `name` (of REWARDS, or a dotted path).

        Never raises for what the response or the grader does: verdicts "timeout" and "crashed" say it, with score 0.
        Raises: RewardError if the grader cannot be loaded or the pool is closed; DataError if label or metadata
        cannot be sent as JSON.
        """
        known = REWARDS.get(name)
        if known is not None and known.quick is not None:
            decided = known.quick(response, label, metadata or {})
            if decided is not None:
                return decided
        request = {"grade": name, "response": response, "label": label, "metadata": dict(metadata or {})}
        try:
            json.dumps(request)
        except (TypeError, ValueError) as error:
            raise DataError(f"label and metadata go to the {name} grader as JSON, which fails: {error}") from error
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._grade, name, {"load": name}, request
        )

    async def call(self, path: str, config: Any, argument: Any) -> CallResult:
        """The value of the plain function at a dotted path, called in a worker with (context, argument).

        Args:
            path: of the function.
            config: the run's settings, which the function finds as `context.config`; picklable.
            argument: one sample or a list of them; the function gets a copy.
        Raises: RewardError if the function cannot be loaded or the pool is closed; DataError if the argument cannot be
            pickled.
        """
        try:
            request = {"call": path, "argument": _pickled(argument)}
        except Exception as error:  # pickling runs the code of whatever is inside
            raise DataError(
                f"samples are copied to the worker that runs {path}, which fails: {type(error).__name__}: {error}; "
                "write it as `async def` to run it in the rollout's own process"
            ) from error
        load = functools.partial(_load_function, path, config)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, path, load, request)

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

    def _grade(self, name: str, load: dict[str, Any], request: dict[str, Any]) -> Grade:
        answer = self._ask(name, lambda: load, request, _check_grade)
        if isinstance(answer, Grade):
            return answer
        if "error" in answer:
            logger.warning("grader %s raised %s", name, answer["error"])
            return CRASHED
        return Grade(float(answer["score"]), answer["verdict"], answer["entries"])

    def _call(self, path: str, load: Callable[[], dict[str, Any]], request: dict[str, Any]) -> CallResult:
        answer = self._ask(path, load, request, _check_value)
        if isinstance(answer, Grade):
            return CallResult(verdict=answer.verdict)
        if "error" in answer:
            return CallResult(error=str(answer["error"]))
        return CallResult(value=answer["value"])

    def _ask(
        self,
        name: str,
        load: Callable[[], dict[str, Any]],
        request: dict[str, Any],
        check: Callable[[Mapping[str, Any]], bool],
    ) -> dict[str, Any] | Grade:
        """The worker's answer, or TIMEOUT or CRASHED where there is none; a worker that suffered is replaced."""
        worker = self._places.get()
        try:
            worker = self._ready(worker, name, load)
            request["kill_after_s"] = 2 * self._timeout_s + 5
            failure = CRASHED
            try:
                answer = worker.ask(request, self._timeout_s)
                if "error" not in answer and not check(answer):
                    raise WorkerFailed(f"it answered {str(answer)[:200]}")
                if answer.get("unfit"):
                    logger.warning("grader %s: its worker is replaced: %s", name, answer["unfit"])
                    self._discard(worker)
                    worker = None
                if not answer.get("fatal"):
                    return answer
                logger.warning("grader %s raised %s; its worker is replaced", name, answer.get("error"))
            except TimeoutError:
                logger.warning("grader %s took more than %g s for a response and was killed", name, self._timeout_s)
                failure = TIMEOUT
            except WorkerFailed as error:
                logger.warning("grader %s: %s; its worker is replaced", name, error)
            self._check_open()
            if worker is not None:
                self._discard(worker)
                worker = None
            return failure
        finally:
            self._places.put(worker)

    def _ready(self, worker: WorkerProcess | None, name: str, load: Callable[[], dict[str, Any]]) -> WorkerProcess:
        """A live worker that has `name` loaded. Raises: RewardError."""
        for starts_left in reversed(range(_STARTS)):
            worker = self._fit(worker)
            if name in worker.loaded:
                break
            try:
                answer = worker.ask(load(), _START_S)
            except (TimeoutError, WorkerFailed) as error:
                words = worker.last_words()
                self._discard(worker)
                worker = None
                self._check_open()
                if starts_left and isinstance(error, WorkerFailed):
                    logger.warning("grader %s: %s while it started; it is started again", name, error)
                    continue
                raise RewardError(
                    f"the process for grader {name!r} does not start: {error!r}; it may have "
                    f"{self._memory_limit_bytes} bytes of address space (--rm-memory-limit-bytes)\n{words}"
                ) from error
            if "error" in answer:
                self._discard(worker)  # it has no place among the workers yet, so nobody else would use or end it
                raise RewardError(f"grader {name!r} cannot be loaded: {answer['error']}")
            worker.loaded.add(name)
        assert worker is not None
        return worker

    def _fit(self, worker: WorkerProcess | None) -> WorkerProcess:
        """The worker if it lives and is undisturbed, or a new one."""
        self._check_open()
        if worker is not None and not worker.is_fit():  # killed from outside, or disturbed by what a grader left behind
            self._discard(worker)
            worker = None
        if worker is None:
            worker = WorkerProcess(self._memory_limit_bytes)
            with self._lock:
                self._workers.add(worker)
            self._check_open()
        return worker

    def _discard(self, worker: WorkerProcess) -> None:
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


def _pickled(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _load_function(path: str, config: Any) -> dict[str, Any]:
    return {"load": path, "config": _pickled(config)}


def _check_grade(answer: Mapping[str, Any]) -> bool:
    score, entries = answer.get("score"), answer.get("entries")
    return _is_number(score) and answer.get("verdict") in VERDICTS and isinstance(entries, dict)


def _check_value(answer: Mapping[str, Any]) -> bool:
    return "value" in answer


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
