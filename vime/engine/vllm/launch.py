"""Runs vLLM's API server as this process's main program, and ends it when its owner is gone.

The owner holds the other end of our standard input. When it dies, however it dies, the pipe closes; without this an
engine whose actor was killed would keep its device's memory for ever.
"""

from __future__ import annotations

import os
import runpy
import select
import shutil
import signal
import sys
import time

SCRATCH = "vime-engine-"
"""How the folder for temporary files is called that an engine's owner makes for it."""
SERVER_MODULE = "vllm.entrypoints.openai.api_server"


def end_with_owner(grace_s: float = 10.0) -> None:
    """Start a guard beside this process: when standard input closes, it ends this process group.

    A process and no thread of this one: Ray kills the children of an actor that dies by SIGKILL, and a server killed so
    would leave its engine core and workers behind. Call it while there is one thread.

    Args: grace_s: from the terminating signal to the killing one.
    """
    group = os.getpgid(0)
    if os.fork() == 0:
        try:
            os.setsid()
            _guard(group, grace_s)
        finally:
            os._exit(0)


def _guard(group: int, grace_s: float) -> None:
    while not (select.select([0], [], [], 2.0)[0] and not os.read(0, 4096)):
        if not _send(group, 0):
            return  # ended in good order
    remove_scratch()
    _send(group, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while _send(group, 0) and time.monotonic() < deadline:
        time.sleep(0.1)
    _send(group, signal.SIGKILL)


def _send(group: int, number: int) -> bool:
    """Signal a process group; whether there is one."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """Run the server with the command line arguments as they are."""
    end_with_owner()
    from vime.engine.vllm import short_answers  # has threads, by numpy

    sys.argv[0] = SERVER_MODULE
    short_answers.install()
    try:
        runpy.run_module(SERVER_MODULE, run_name="__main__", alter_sys=True)
    finally:
        remove_scratch()


def remove_scratch() -> None:
    """Remove the folder of temporary files, which an owner that was killed cannot do."""
    folder = os.environ.get("TMPDIR", "")
    if os.path.basename(folder).startswith(SCRATCH):
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
