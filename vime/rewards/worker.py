"""The process that grades for a `GraderPool`: one JSON line in, one out. Run as `python -m vime.rewards.worker`.

It holds nothing worth keeping: the pool kills it whenever it hangs, dies or answers nonsense.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from vime.rewards import REWARDS, Grade
from vime.rewards.grade import VERDICTS, GradeFunction

_MAX_FILE_BYTES = 1 << 20  # a grader has no business writing files; this bounds what a runaway one can do


def load_grader(name: str) -> GradeFunction:
    """A grader of `REWARDS`, or the function at a dotted path. Raises: ImportError, AttributeError, ValueError."""
    if name in REWARDS:
        return REWARDS[name]
    module_name, dot, attribute = name.rpartition(".")
    if not dot:
        raise ValueError(f"no grader is called {name!r}; there are {sorted(REWARDS)}, or give a dotted path")
    __import__(module_name)
    function: GradeFunction = getattr(sys.modules[module_name], attribute)
    return function


def main(memory_limit_bytes: int) -> None:
    """Answer requests until the input ends.

    Requests: {"load": name} imports a grader ahead of its first response; {"grade": name, "response", "label",
    "metadata", "kill_after_s"} grades. Answers: {"loaded": name}, {"score", "verdict"}, or {"error": text, "fatal":
    whether the error may have damaged this process, which then ends}.
    """
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE_BYTES, _MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What a grader prints must not land between our answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDWR)
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    os.dup2(null, 0)
    os.dup2(null, 1)
    graders: dict[str, GradeFunction] = {}
    for line in requests:
        answer = _answer(json.loads(line), graders)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if answer.get("fatal"):
            os._exit(1)
        if "loaded" in answer:
            os.dup2(null, 2)  # until here the error output explained a failed start; graders' chatter would fill it


def _answer(request: dict[str, Any], graders: dict[str, GradeFunction]) -> dict[str, Any]:
    if "load" in request:
        return _guarded(lambda: _load(request["load"], graders))
    # If the parent is gone while a grader hangs, nobody kills us: the kernel does, whatever Python is stuck in.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, request["kill_after_s"])
    try:
        return _guarded(
            lambda: _check(graders[request["grade"]](request["response"], request["label"], request["metadata"]))
        )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _guarded(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except BaseException as error:  # the grader is foreign code; whatever it raises, SystemExit too, is its answer
        is_fatal = isinstance(error, MemoryError) or not isinstance(error, Exception)
        return {"error": f"{type(error).__name__}: {str(error)[:1000]}", "fatal": is_fatal}


def _load(name: str, graders: dict[str, GradeFunction]) -> dict[str, Any]:
    grader = load_grader(name)
    prepare = getattr(sys.modules[grader.__module__], "prepare", None)
    if prepare is not None:
        prepare()
    graders[name] = grader
    return {"loaded": name}


def _check(grade: Any) -> dict[str, Any]:
    if not isinstance(grade, Grade) or grade.verdict not in VERDICTS:
        raise TypeError(f"a grader returns a Grade, not {grade!r}")
    return {"score": float(grade.score), "verdict": grade.verdict}


if __name__ == "__main__":
    main(int(sys.argv[1]))
