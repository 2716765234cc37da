"""Processes that are killed by SIGKILL before the n-th thing they do to the file system."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def in_a_fork(function: Callable[[], object]) -> bool:
    """Run it in a process of its own. Returns: whether that was killed."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the run failed instead of being killed"
    return os.WIFSIGNALED(status)


def die_before(event: int) -> None:
    """Have this process killed before its n-th change of the file system from now on."""
    count = 0

    def hook(name: str, args: Any) -> None:
        nonlocal count
        count += name in EVENTS
        if name in EVENTS and count > event:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
