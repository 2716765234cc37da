"""The process that grades for a `GraderPool`: one JSON line in, one out. Run as `python -m vime.rewards.worker`.

It holds nothing worth keeping: the pool kills it whenever it hangs, dies or answers nonsense.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import pickle
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from vime.rewards import REWARDS, Grade
from vime.rewards.confine import confine
from vime.rewards.grade import VERDICTS, GradeFunction

_MAX_FILE_BYTES = 1 << 20  # a grader has no business writing files; this bounds what a runaway one can do
_PR_SET_CHILD_SUBREAPER = 36


def load_grader(name: str) -> GradeFunction:
    """A grader of `REWARDS`, or the function at a dotted path. Raises: ImportError, AttributeError, ValueError."""
    if name in REWARDS:
        return REWARDS[name].grade
    module_name, dot, attribute = name.rpartition(".")
    if not dot:
        raise ValueError(f"no grader is called {name!r}; there are {sorted(REWARDS)}, or give a dotted path")
    __import__(module_name)
    function: GradeFunction = getattr(sys.modules[module_name], attribute)
    return function


def main(memory_limit_bytes: int) -> None:
    """Answer requests until the input ends; every answer repeats its request's "id".

    Requests: {"load": name} imports a grader ahead of its first response, {"load": path, "config": pickle} a function
    that is called; {"grade": name, "response", "label", "metadata", "kill_after_s"} grades; {"call": path, "argument":
    pickle, "kill_after_s"} calls. Answers: {"loaded": name}, {"score", "verdict", "entries"}, {"value"}, or {"error":
    text, "fatal": whether the error may have damaged this process, which then ends}. "unfit" beside them says why this
    process should do no further work.
    """
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE_BYTES, _MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        # Orphans of what a grader starts stay below this process, where the pool finds them when it kills.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        confine()
    # What a grader prints must not land between our answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDWR)
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    os.dup2(null, 0)
    os.dup2(null, 1)
    process_id = os.getpid()
    worker = _Worker(memory_limit_bytes)
    for line in requests:
        request = json.loads(line)
        answer = worker.answer(request)
        if os.getpid() != process_id:
            os._exit(0)  # the grader forked, and this is the copy: its answer is nobody's
        answer["id"] = request["id"]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if answer.get("fatal"):
            os._exit(1)
        if "loaded" in answer:
            os.dup2(null, 2)  # until here the error output explained a failed start; graders' chatter would fill it


class _Worker:
    """Loaded graders, and what tells whether one of them left the process in a state to go on."""

    def __init__(self, memory_limit_bytes: int) -> None:
        self._limit_bytes = memory_limit_bytes
        self._graders: dict[str, GradeFunction] = {}
        self._functions: dict[str, Callable[[Any], Any]] = {}
        self._num_threads, self._loaded_bytes = threading.active_count(), 0

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "load" in request:
            answer = _guarded(lambda: self._load(request))
            self._num_threads, self._loaded_bytes = threading.active_count(), _address_space_bytes()
            return answer
        # If the parent is gone while a grader hangs, nobody kills us: the kernel does, whatever Python is stuck in.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, request["kill_after_s"])
        try:
            answer = _guarded(lambda: self._work(request))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if reason := self._unfit():
            answer["unfit"] = reason
        return answer

    def _load(self, request: dict[str, Any]) -> dict[str, Any]:
        name = request["load"]
        function = load_grader(name)
        if "config" in request:
            from vime.rewards.worker_context import worker_context

            context = worker_context(pickle.loads(base64.b64decode(request["config"])), name)
            self._functions[name] = lambda argument: function(context, argument)  # type: ignore[call-arg, arg-type]
            return {"loaded": name}
        prepare = getattr(sys.modules[function.__module__], "prepare", None)
        if prepare is not None:
            prepare()
        self._graders[name] = function
        return {"loaded": name}

    def _work(self, request: dict[str, Any]) -> dict[str, Any]:
        if "call" in request:
            argument = pickle.loads(base64.b64decode(request["argument"]))
            return {"value": _plain(self._functions[request["call"]](argument))}
        grader = self._graders[request["grade"]]
        return _check(grader(request["response"], request["label"], request["metadata"]))

    def _unfit(self) -> str | None:
        """Why the next sample should not be graded here: something a grader left behind could cost it its grade."""
        if _has_children():
            return "a process was left behind"
        if threading.active_count() > self._num_threads:
            return "a thread was left behind"
        used = _address_space_bytes()
        if used - self._loaded_bytes > (self._limit_bytes - self._loaded_bytes) / 2:
            return f"{used - self._loaded_bytes} bytes were not given back"
        return None


def _has_children() -> bool:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def _address_space_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux: nothing to look at
        return 0


def _guarded(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except BaseException as error:  # the grader is foreign code; whatever it raises, SystemExit too, is its answer
        from vime.config.hooks import raised

        is_fatal = isinstance(error, MemoryError) or not isinstance(error, Exception)
        return {"error": raised(error)[:1000], "fatal": is_fatal}


def _check(grade: Any) -> dict[str, Any]:
    if not isinstance(grade, Grade) or grade.verdict not in VERDICTS:
        raise TypeError(f"a grader returns a Grade, not {repr(grade)[:200]}")
    return {"score": float(grade.score), "verdict": grade.verdict, "entries": dict(grade.entries)}


def _plain(value: Any) -> Any:
    """A function's value as JSON can carry it; what it cannot becomes text, which the pool's owner will refuse."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    try:
        return float(value.item())  # numpy's and torch's scalars
    except (AttributeError, TypeError, ValueError):
        return repr(value)[:200]


if __name__ == "__main__":
    main(int(sys.argv[1]))
