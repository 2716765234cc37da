"""What `train.py` and `train_async.py` have in common; imports nothing that may not be installed."""

from __future__ import annotations

import sys
import time


def start(name: str, *, overlapped: bool = False) -> int:
    """Run with the words of the command line. Args: name: the program's, for errors. Returns: the exit code."""
    begin = time.perf_counter()
    sys.path.insert(0, "")  # hooks are looked for where the command is given, as by `vime config`
    try:
        from vime.cli.launch import main

        return main(sys.argv[1:], overlapped=overlapped, begin=begin)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("vime"):
            raise
        print(
            f"{name}: {error.name} is not installed in this Python ({sys.executable}); "
            "run `make setup`, then `source .venv/bin/activate`",
            file=sys.stderr,
        )
        return 1
