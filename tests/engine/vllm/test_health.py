"""A server that stops serving is noticed, and said to be what it is; on a process of the standard library's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from vime.engine.vllm import health
from vime.engine.vllm.health import group_members, stopped_members, until_failure

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(sys.argv[1])); self.end_headers()
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
if sys.argv[2] == "closes":
    server.handle_request()
    server.server_close()
    import time; time.sleep(600)
server.serve_forever()
"""


class Served:
    def __init__(self, status: int = 200, how: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(status), how or "serves"], stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def words(self, *, timeout_s: float = 60.0) -> str:
        return until_failure(
            pid=self.process.pid,
            url=self.url,
            path="/health",
            key="key",
            has_ended=lambda: None if self.process.poll() is None else f"exit code {self.process.returncode}",
            interval_s=0.05,
            timeout_s=timeout_s,
        )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_LOOK_S", 0.05)
    monkeypatch.setattr(health, "_STOPPED_S", 0.1)


@pytest.fixture
def served() -> Iterator[list[Served]]:
    made: list[Served] = []
    yield made
    for one in made:
        one.process.kill()
        one.process.wait()


def test_a_server_that_ended_a_dead_one_and_one_without_a_port(served: list[Served]) -> None:
    served += [Served(), Served(503), Served(how="closes")]
    served[0].process.kill()
    served[0].process.wait()
    assert served[0].words() == "exit code -9"
    assert "503" in served[1].words()
    assert "closed its port" in served[2].words()


def test_a_stopped_server_is_found_in_its_process_group(served: list[Served]) -> None:
    served += [Served()]
    pid = served[0].process.pid
    assert group_members(pid) == [pid] and stopped_members(pid, [pid]) == []
    os.kill(pid, signal.SIGSTOP)
    assert "has been stopped (SIGSTOP)" in served[0].words()
    assert stopped_members(pid, group_members(pid)) == [pid] and stopped_members(pid + 1, [pid]) == []


def test_a_mute_server_is_given_its_time(served: list[Served]) -> None:
    served += [Served()]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        served[0].url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "has not answered for" in served[0].words(timeout_s=0.2)
