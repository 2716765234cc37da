"""Control calls against servers that fail, or take their time, on purpose."""

from __future__ import annotations

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vime.engine.vllm import watch
from vime.engine.vllm.control import VllmEngine
from vime.engine.vllm.versions import KNOWN
from vime.errors import EngineDead


def test_an_engine_that_closes_its_port_and_never_answers_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    # What vLLM's server does when its engine core dies during a request: it waits for the connection to end.
    monkeypatch.setattr(watch, "_LOOK_S", 0.1)
    listener = socket.create_server(("127.0.0.1", 0))
    accepted: list[socket.socket] = []

    def accept_and_close() -> None:
        accepted.append(listener.accept()[0])
        listener.close()

    threading.Thread(target=accept_and_close, daemon=True).start()
    engine = VllmEngine(f"http://127.0.0.1:{listener.getsockname()[1]}", "key", KNOWN[0, 32])
    # At the request's own time limit it would be an EngineError of other words.
    with pytest.raises(EngineDead, match="closed its port while a request was open"):
        engine.pause()
    accepted[0].close()


def test_an_engine_that_takes_its_time_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_LOOK_S", 0.02)

    class Slow(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            time.sleep(0.2)  # ten looks at it
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status": "paused"}')

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            VllmEngine(f"http://127.0.0.1:{server.server_port}", "key", KNOWN[0, 32]).pause()
        finally:
            server.shutdown()
