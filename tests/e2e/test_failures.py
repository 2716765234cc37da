"""What happens when something dies: a clear end, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from vime.loop.checkpoint import find_checkpoints, open_checkpoint

pytestmark = pytest.mark.engine


class Running:
    """A train.py with its output so far, and every process it ever started."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.lines = process, list[str]()
        self.seen: dict[int, tuple[psutil.Process, str]] = {}  # by pid, with the command line
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def note_processes(self) -> None:
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):  # ended between the listing and the reading
                self.seen[child.pid] = (child, " ".join(child.cmdline()))

    def wait_for(self, text: str, timeout_s: float = 900) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            self.note_processes()
            if self.process.poll() is not None:
                self._reader.join(60)
                assert text in self.output, f"ended before {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r} in {timeout_s} s:\n{self.output}"
            time.sleep(0.2)

    def wait_for_more(self, text: str, count: int) -> None:
        """Until it was said more than `count` times."""
        while self.output.count(text) <= count and self.process.poll() is None:
            self.note_processes()
            time.sleep(0.2)
        self._reader.join(60 if self.process.poll() is not None else 0)
        assert self.output.count(text) > count, f"ended without another {text!r}:\n{self.output}"

    def find(self, word: str) -> psutil.Process:
        self.note_processes()
        found = [p for p, words in self.seen.values() if _is_alive(p) and word in words]
        assert found, f"no process with {word} on its command line"
        return found[0]

    def end(self, timeout_s: float = 300) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(60)
        return code

    def left_behind(self, *words: str) -> list[str]:
        """Command lines (with one of `words`, if given) of processes that outlive the run by more than some seconds."""
        watched = [(p, line) for p, line in self.seen.values() if not words or any(word in line for word in words)]
        assert watched
        deadline = time.monotonic() + 120
        while alive := [line for p, line in watched if _is_alive(p)]:
            if time.monotonic() > deadline:
                return [line[:120] for line in alive]
            time.sleep(0.5)
        return []


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _listens_beyond_loopback(process: psutil.Process) -> bool:
    try:
        listening = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return False
    return any(not c.laddr.ip.startswith("127.") and c.laddr.ip != "::1" for c in listening)


def _is_rays(command_line: str) -> bool:
    """Ray's servers, and the workers in which it runs vime's code: docs/multi_node.md names them."""
    return "ray::" in command_line or "/ray/" in command_line


ONE_STEP_AHEAD = pytest.param("train_async.py", marks=pytest.mark.slow)
PROGRAMS = pytest.mark.parametrize("program", ["train.py", ONE_STEP_AHEAD])


@pytest.fixture
def running(
    start_train: Callable[..., subprocess.Popen[str]], grpo_flags: list[str], tmp_path: Path
) -> Callable[..., Running]:
    def start(*flags: str, program: str = "train.py") -> Running:
        length = ("--num-rollout", "500", "--skip-eval-before-train")
        return Running(start_train(*grpo_flags, "--run-dir", str(tmp_path), *length, *flags, program=program))

    return start


@PROGRAMS
def test_a_killed_engine_ends_the_run_with_its_name_and_log(running: Callable[..., Running], program: str) -> None:
    run = running("--no-use-fault-tolerance", program=program)
    run.wait_for("rollout   1/500")
    run.find("vime.engine.vllm.launch").kill()
    assert run.end() == 1
    assert "EngineDead" in run.output and "engine_0.log" in run.output, run.output
    assert run.left_behind() == []


@PROGRAMS
def test_a_killed_trainer_rank_ends_the_run_with_its_name(running: Callable[..., Running], program: str) -> None:
    run = running(program=program)
    run.wait_for("rollout   1/500")
    run.find("TrainerWorker").kill()
    assert run.end() == 1
    assert "training rank 0" in run.output, run.output
    assert run.left_behind() == []


@pytest.mark.parametrize(
    ("kill", "number", "program"),
    [
        (os.kill, signal.SIGINT, "train.py"),
        pytest.param(os.killpg, signal.SIGTERM, "train.py", marks=pytest.mark.slow),
        pytest.param(os.kill, signal.SIGINT, "train_async.py", marks=pytest.mark.slow),
    ],
)
def test_interrupting_ends_every_process_and_the_key_was_written_nowhere(
    running: Callable[..., Running], tmp_path: Path, kill: Callable[[int, int], None], number: int, program: str
) -> None:
    """However often it is asked to, also with its whole process group, and with every checkpoint whole."""
    run = running("--save", str(tmp_path / "checkpoints"), "--save-interval", "1", program=program)
    run.wait_for("rollout   1/500")
    key = run.find("vime.engine.vllm.launch").environ()["VIME_RUN_KEY"]
    token = run.find("raylet/raylet").environ()["RAY_AUTH_TOKEN"]
    on_every_interface = {line for process, line in run.seen.values() if _listens_beyond_loopback(process)}
    assert on_every_interface and not [line for line in on_every_interface if not _is_rays(line)], on_every_interface
    for server in ("gcs_server", "raylet/raylet"):  # else a signal to the group takes Ray from under the driver
        assert os.getpgid(run.find(server).pid) != os.getpgid(run.process.pid), server
    kill(run.process.pid, number)
    run.wait_for("vime: stopping")
    for again in (number, signal.SIGINT):
        kill(run.process.pid, again)
    assert run.end() == 130, run.output
    saved = find_checkpoints(tmp_path / "checkpoints")
    named = sorted(p for p in (tmp_path / "checkpoints").iterdir() if p.is_dir() and not p.name.startswith("."))
    assert saved and named == saved, "a folder with a checkpoint's name is a whole checkpoint"
    assert open_checkpoint(tmp_path / "checkpoints").path == saved[-1]
    assert run.left_behind() == []
    for secret in (key, token):
        assert not [line for _, line in run.seen.values() if secret in line], "a key of the run's is on a command line"
        assert not [p for p in tmp_path.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]
        assert secret not in run.output


def test_a_killed_driver_leaves_no_engine_router_or_trainer_behind(running: Callable[..., Running]) -> None:
    """Ray's own agents notice later that their node is gone; what holds memory and devices must end at once."""
    run = running()
    run.wait_for("rollout   1/500")
    run.note_processes()
    run.process.kill()
    run.end()
    assert run.left_behind("vime.engine", "EngineWorker", "TrainerWorker", "raylet", "gcs_server") == []
