"""Small things every child process of vime needs: a port, an import path, the end of its log, an orderly end."""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

import vime

logger = logging.getLogger(__name__)

_TAIL_BYTES = 1 << 16
_EXCEPTION = re.compile(r"\b[A-Za-z_][\w.]*(?:Error|Exception): .{1,500}")

SERVER_VARIABLE = "VIME_ENGINE_SERVER_MODULE"
"""Names a module to run in place of vLLM's server; for tests that need many engines, or fast ones."""
SERVER_MODULE = "vime.engine.vllm.launch"

PORT_TRIES = 3
"""How often a process is started when somebody takes its port between the choice and the binding."""

# Below what Linux hands to outgoing connections, which could take a port before the child binds it.
_PORTS = range(10_000, 32_768)


def server_module(environment: Mapping[str, str]) -> str:
    """The module that an engine's process runs: vLLM's server, or what stands in for it in a test."""
    name = environment.get(SERVER_VARIABLE) or SERVER_MODULE
    if name != SERVER_MODULE:
        logger.warning("%s is set: engines are %s, not vLLM", SERVER_VARIABLE, name)
    return name


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port nobody listens on right now, drawn at random so that runs that start together seldom meet.

    Raises: OSError if none of many tried was free.
    """
    problem = OSError("no port was tried")
    for port in secrets.SystemRandom().sample(_PORTS, 50):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            try:
                sock.bind((host, port))
            except OSError as error:
                problem = error
            else:
                return port
    raise problem


def import_path(environment: Mapping[str, str]) -> str:
    """PYTHONPATH for a child, such that it imports the same vime as this process."""
    package_root = str(Path(vime.__file__).parents[1])
    return os.pathsep.join(
        dict.fromkeys([package_root, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))])
    )


def local_client(key: str) -> httpx.Client:
    """A client for one of the run's own processes, with the run's key.

    It asks no proxy that the environment names: that is for the world outside, may not reach this machine, and must
    not see the key.
    """
    return httpx.Client(timeout=5.0, headers={"Authorization": f"Bearer {key}"}, trust_env=False)


def without_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child that talks to the run's own processes alone; see `local_client`."""
    return {name: value for name, value in environment.items() if not name.lower().endswith("_proxy")}


def log_tail(path: Path, lines: int) -> str:
    """The last lines of a log file; empty when there is none yet."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def says_address_in_use(path: Path, begin: int) -> bool:
    """Whether a log says, from byte `begin` on, that somebody else had the port."""
    with path.open("rb") as file:
        file.seek(begin)
        return b"address already in use" in file.read().lower()


def log_errors(path: Path, lines: int, begin: int = 0) -> str:
    """The first few distinct exceptions a log reports from byte `begin` on: the root cause stands before the end."""
    with path.open("rb") as file:
        file.seek(begin)
        text = file.read().decode(errors="replace")
    found = (match.group(0) for match in _EXCEPTION.finditer(text))
    return "\n".join(list(dict.fromkeys(found))[:lines])


def stop_process(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Terminate a process started in its own session, with its whole group; kill what is left after `grace_s`."""
    _signal_group(process.pid, signal.SIGTERM)
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()
    # The leader is gone; its children get a moment of their own before they are killed.
    deadline = time.monotonic() + 2.0
    while _group_exists(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal_group(process.pid, signal.SIGKILL)
    if process.stdin:
        process.stdin.close()


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass  # nobody left in it


def _group_exists(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True
