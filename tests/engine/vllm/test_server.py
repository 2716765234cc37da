"""Command line and environment of an engine; processes that end. No vLLM is started."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from vime.engine.vllm.processes import free_port, log_errors, log_tail, stop_process
from vime.engine.vllm.server import EngineServer, flags_from_arguments
from vime.engine.vllm.versions import KNOWN
from vime.errors import ConfigError, EngineDead, EngineError


def server(
    tmp_path: Path, minor: int = 32, environment: dict[str, str] | None = None, **arguments: Any
) -> EngineServer:
    return EngineServer(
        "/models/tiny",
        arguments=arguments,
        environment=environment or {},
        key="run-key",
        log_path=tmp_path / "logs" / "engine.log",
        adapter=KNOWN[0, minor],
    )


def test_arguments_become_flags() -> None:
    arguments = {
        "max_model_len": 512,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "quantization": None,
        "hf_overrides": {"rope": 1},
        "allowed_origins": ["a", "b"],
    }
    assert flags_from_arguments(arguments) == [
        *("--max-model-len", "512", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--hf-overrides", '{"rope": 1}', "--allowed-origins", "a", "b"),
    ]


def test_the_command_line_has_what_vime_owns_and_no_key(tmp_path: Path) -> None:
    command = server(tmp_path, dtype="float32").command(1234)
    assert command[1:3] == ["-m", "vime.engine.vllm.launch"]
    for flag, value in {
        "--model": "/models/tiny",
        "--port": "1234",
        "--host": "127.0.0.1",
        "--dtype": "float32",
        "--logprobs-mode": "processed_logprobs",
        "--weight-transfer-config": '{"backend": "vime"}',
        "--worker-extension-cls": "vime.engine.vllm.worker_ext.WorkerExtension",
        "--middleware": "vime.engine.vllm.middleware.RunKeyMiddleware",
    }.items():
        assert command[command.index(flag) + 1] == value
    assert "run-key" not in " ".join(command)


def test_only_the_release_that_has_the_flag_gets_it(tmp_path: Path) -> None:
    assert "--enable-scale-out" in server(tmp_path, 32).command(1)
    assert "--enable-scale-out" not in server(tmp_path, 26).command(1)


def test_arguments_vime_owns_are_refused_all_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        server(tmp_path, logprobs_mode="raw_logprobs", api_key="x", max_model_len=5)
    assert len(caught.value.problems) == 2
    assert "--vllm-logprobs-mode cannot be set: log-probs must be" in caught.value.problems[0]


def test_the_environment_carries_the_key_and_opens_the_control_routes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "other")
    environment = server(tmp_path, environment={"TORCHDYNAMO_DISABLE": "1"}).child_environment()
    assert environment["VIME_RUN_KEY"] == "run-key"
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["TORCHDYNAMO_DISABLE"] == "1"
    assert "VLLM_API_KEY" not in environment


def test_an_engine_that_was_not_started_has_no_address(tmp_path: Path) -> None:
    engine = server(tmp_path)
    assert not engine.is_alive()
    with pytest.raises(EngineError, match="not started"):
        _ = engine.url
    engine.stop()


def test_a_server_that_ends_is_reported_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    script = "import tempfile; tempfile.mkstemp(); print('no room for the KV cache'); raise SystemExit(3)"
    program = [sys.executable, "-c", script]
    monkeypatch.setattr(EngineServer, "command", lambda self, port: program)
    engine = server(tmp_path)
    engine.start()
    with pytest.raises(EngineDead, match=r"exit code 3(.|\n)*no room for the KV cache"):
        engine.wait_ready(120)
    with pytest.raises(EngineError, match="already started"):
        engine.start()
    (scratch,) = tmp_path.glob("vime-engine-*")
    assert len(list(scratch.iterdir())) == 1
    engine.stop()
    assert not scratch.exists()


_ANSWERS = """
import http.server, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        mine = self.path == "/health" or self.headers["Authorization"] == "Bearer " + sys.argv[2]
        self.send_response(200 if mine else 401)
        self.end_headers()

    def log_message(self, *arguments):
        pass

server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def test_an_engine_whose_port_was_taken_meanwhile_starts_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And takes no other run's engine on that port for its own."""
    other = subprocess.Popen([sys.executable, "-c", _ANSWERS, "0", "another-key"], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        taken = int(other.stdout.readline())
        chosen = [taken]
        monkeypatch.setattr("vime.engine.vllm.server.free_port", lambda host: chosen.pop() if chosen else free_port())
        program = [sys.executable, "-c", f"import time; time.sleep(0.3)\n{_ANSWERS}"]
        monkeypatch.setattr(EngineServer, "command", lambda self, port: [*program, str(port), "run-key"])
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # it is none of the run's business
        engine = server(tmp_path)
        engine.start()
        engine.wait_ready(120)
        assert engine.url != f"http://127.0.0.1:{taken}"
        assert "Address already in use" in engine.log_path.read_text()
        engine.stop()
    finally:
        other.kill()
        other.communicate()


def test_a_server_that_never_answers_is_given_up_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = [sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(600)"]
    monkeypatch.setattr(EngineServer, "command", lambda self, port: program)
    engine = server(tmp_path)
    engine.start()
    seen: list[str] = []
    with pytest.raises(EngineError, match="was not ready after 1 s"):
        engine.wait_ready(1.0, lambda seconds, line: seen.append(line))
    assert engine.is_alive() and seen
    engine.stop()
    assert not engine.is_alive()


def test_stopping_ends_children_that_ignore_the_signal() -> None:
    child = (
        "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    parent = f"import subprocess,sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    process = subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    stop_process(process, 5.0)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("a child outlived stop_process")


def test_a_launched_server_ends_when_its_owner_is_gone(tmp_path: Path) -> None:
    program = "from vime.engine.vllm.launch import end_with_owner; end_with_owner(); import time; time.sleep(600)"
    (scratch := tmp_path / "vime-engine-1").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(120) == -15
    assert not scratch.exists()


def test_what_a_killed_server_leaves_ends_with_its_owner() -> None:
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); print('here', flush=True); time.sleep(600)"
    program = (
        "from vime.engine.vllm.launch import end_with_owner; end_with_owner(0.2); import subprocess, sys; "
        f"print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True); import time; time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    words = {process.stdout.readline().strip(), process.stdout.readline().strip()}
    (pid,) = words - {"here"}
    process.kill()  # as Ray does with the children of an actor that died
    process.wait()
    assert psutil.pid_exists(int(pid))
    process.stdin.close()
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(pid)).wait(120)
    process.stdout.close()


def test_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert log_tail(log, 3) == ""
    log.write_text("\n".join(map(str, range(100_000))))
    assert log_tail(log, 2) == "99998\n99999"


def test_the_exceptions_a_log_reports_come_first_and_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "INFO up\nERROR ValueError: no room\nValueError: no room\n" + "at\n" * 99 + "RuntimeError: see above\n"
    )
    assert log_errors(log, 5) == "ValueError: no room\nRuntimeError: see above"


def test_a_free_port_can_be_bound() -> None:
    import socket

    with socket.create_server(("127.0.0.1", free_port())):
        pass
