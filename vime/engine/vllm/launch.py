"""Runs vLLM's API server as this process's main program, and ends it when its owner is gone.

The owner holds the other end of our standard input. When it dies, however it dies, the pipe closes; without this an
engine whose actor was killed would keep its device's memory for ever.
"""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import sys
import threading

SCRATCH = "vime-engine-"
"""How the folder for temporary files is called that an engine's owner makes for it."""
SERVER_MODULE = "vllm.entrypoints.openai.api_server"


def end_with_owner() -> None:
    """Watch standard input; when it closes, terminate this process group."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        remove_scratch()
        os.killpg(os.getpgid(0), signal.SIGTERM)

    threading.Thread(target=watch, name="owner-watch", daemon=True).start()


def main() -> None:
    """Run the server with the command line arguments as they are."""
    end_with_owner()
    sys.argv[0] = SERVER_MODULE
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
