"""Two runs in one folder of checkpoints."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vime.errors import ConfigError
from vime.loop.checkpoint import find_checkpoints
from vime.loop.folder_lock import only_run_in


def elsewhere(function: Callable[[], None]) -> None:
    """Run in a process of its own."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_second_run_is_refused_by_the_name_of_the_first_until_that_has_ended(tmp_path: Path) -> None:
    folder, first = tmp_path / "a" / "saves", os.getpid()

    def second() -> None:
        with pytest.raises(ConfigError, match=f"is written to by another run .process {first} on "):
            with only_run_in(folder):
                pass

    with only_run_in(folder):
        elsewhere(second)
        elsewhere(second)
    with only_run_in(folder):
        assert find_checkpoints(folder) == []


def test_a_killed_run_leaves_its_folder_free_though_a_child_of_it_lives(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with only_run_in(tmp_path):
            child = os.fork()
            if child == 0:
                signal.pause()
            os.write(writing, str(child).encode())
            signal.pause()
    child = int(os.read(reading, 20))
    try:

        def second() -> None:
            with pytest.raises(ConfigError, match=f"process {pid} on "):
                with only_run_in(tmp_path):
                    pass

        elsewhere(second)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with only_run_in(tmp_path):
            os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(reading)
        os.close(writing)
