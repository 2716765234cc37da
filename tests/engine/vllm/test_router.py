"""The router process with a stand-in for an engine, and the validator alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import psutil
import pytest

from vime.engine.vllm.processes import free_port
from vime.engine.vllm.router import KeyValidator, RouterProcess, router_arguments
from vime.errors import ConfigError, EngineError

KEY = "router-key"


class Engine(BaseHTTPRequestHandler):
    """Healthy, and answers a POST with the Authorization and X-Request-Id it got."""

    def do_GET(self) -> None:
        self._answer(b"{}")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self._answer(f'{{"got": "{self.headers.get("authorization")} {self.headers.get("x-request-id")}"}}'.encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def router(engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    process = RouterProcess(
        [engine_url], settings={}, key=KEY, log_path=tmp_path_factory.mktemp("router") / "router.log"
    )
    with pytest.MonkeyPatch.context() as environment:
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):  # neither the router nor its owner may ask a proxy
            environment.setenv(name, "http://127.0.0.1:9")
        process.start()
        process.wait_ready(120)
    yield process
    process.stop()


def test_the_callers_key_and_request_id_travel_on_to_the_engine(router: RouterProcess) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": "r-1"}
    body = {"token_ids": [1], "sampling_params": {}}
    answer = httpx.post(f"{router.url}/inference/v1/generate", json=body, headers=headers)
    assert answer.json() == {"got": f"Bearer {KEY} r-1"}


def test_without_the_key_the_router_refuses(router: RouterProcess) -> None:
    assert httpx.get(f"{router.url}/workers").status_code == 401
    assert httpx.get(f"{router.url}/health", headers={"Authorization": "Bearer other"}).status_code == 401


def test_a_router_whose_owner_dies_ends(engine_url: str, tmp_path: Path) -> None:
    process = RouterProcess([engine_url], settings={}, key=KEY, log_path=tmp_path / "router.log")
    process.start()
    process.wait_ready(120)
    inner = process._process
    assert inner is not None and inner.stdin is not None
    inner.stdin.close()
    assert inner.wait(120) != 0


def test_a_router_whose_key_check_is_killed_ends(engine_url: str, tmp_path: Path) -> None:
    """It would refuse everybody and look alive."""
    router = RouterProcess([engine_url], settings={}, key=KEY, log_path=tmp_path / "router.log")
    router.start()
    try:
        router.wait_ready()
        assert router.pid is not None and router.is_alive()
        (validator,) = psutil.Process(router.pid).children()
        validator.kill()
        psutil.wait_procs([psutil.Process(router.pid)], timeout=60)
        assert not router.is_alive()
    finally:
        router.stop()


@pytest.mark.parametrize("which", [0, 1])
def test_a_router_whose_port_was_taken_meanwhile_starts_on_another(
    engine_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """Its own port, or that of its metrics."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        given: list[int] = []

        def choose(host: str) -> int:
            given.append(port if len(given) == which else free_port())
            return given[-1]

        monkeypatch.setattr("vime.engine.vllm.router.free_port", choose)
        process = RouterProcess([engine_url], settings={}, key=KEY, log_path=tmp_path / "router.log")
        process.start()
        process.wait_ready(120)
        assert len(given) >= 4 and process.url == f"http://127.0.0.1:{given[-2]}"
        process.stop()


def test_an_engine_that_does_not_answer_is_told(tmp_path: Path) -> None:
    process = RouterProcess(
        ["http://127.0.0.1:9"], settings={"worker_startup_timeout_secs": 1}, key=KEY, log_path=tmp_path / "router.log"
    )
    process.start()
    with pytest.raises(EngineError, match="router"):
        process.wait_ready(3)
    process.stop()


def test_settings_vime_owns_are_refused() -> None:
    with pytest.raises(ConfigError, match="--router-api-key cannot be set"):
        RouterProcess(["http://x"], settings={"api_key": "a"}, key=KEY, log_path=Path("unused"))
    with pytest.raises(ConfigError, match="at least one engine"):
        RouterProcess([], settings={}, key=KEY, log_path=Path("unused"))


def test_router_arguments_name_the_validator_and_no_key() -> None:
    arguments = router_arguments({"policy": "round_robin", "worker_urls": ["http://x"]}, "http://validator/")
    assert arguments["api_key"] is None
    assert arguments["api_key_validation_urls"] == ["http://validator/"]
    with pytest.raises(ConfigError, match="polcy"):
        router_arguments({"polcy": "random"}, "http://validator/")


def test_the_validator_answers_many_requests_on_one_connection() -> None:
    async def run() -> list[int]:
        validator = KeyValidator(KEY)
        serving = asyncio.create_task(validator.serve())
        async with httpx.AsyncClient() as http:
            statuses = []
            for headers in ({}, {"Authorization": f"Bearer {KEY}"}, {"Authorization": "Bearer x"}):
                statuses.append((await http.get(validator.url, headers=headers)).status_code)
                statuses.append((await http.post(validator.url, headers=headers, content=b"body")).status_code)
        serving.cancel()
        return statuses

    assert asyncio.run(run()) == [401, 401, 200, 200, 401, 401]


def test_the_validator_says_yes_to_the_key_alone() -> None:
    async def ask() -> None:
        validator = KeyValidator("the-key")
        serving = asyncio.create_task(validator.serve())
        right = {"Authorization": "Bearer the-key"}
        refused: list[dict[str, str] | list[tuple[str, str]]] = [
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Bearer"},
            {"Authorization": "the-key"},
            {"Authorization": "Bearer the-key2"},
            {"X-API-Key": "the-key"},
            [("Authorization", "Bearer the-key"), ("Authorization", "Bearer the-key")],
        ]
        async with httpx.AsyncClient(base_url=validator.url, trust_env=False) as http:
            for method, path in (("GET", "/"), ("POST", "/"), ("GET", "/health"), ("DELETE", "/anything")):
                for headers in refused:
                    answer = await http.request(method, path, headers=headers)
                    assert (answer.status_code, answer.content) == (401, b""), (method, path, headers)
                assert (
                    await http.request(method, path, headers={"Authorization": "Bearer the-key"})
                ).status_code == 200
            host, port = validator.url.removeprefix("http://").rstrip("/").split(":")
            for garbage in (b"\x80\x04\x95 no HTTP\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000):
                reader, writer = await asyncio.open_connection(host, int(port))
                with contextlib.suppress(ConnectionError):
                    writer.write(garbage)
                    writer.write_eof()
                    assert b"200" not in await reader.read()
                writer.close()
            assert (await http.get("/", headers=right)).status_code == 200
        serving.cancel()

    asyncio.run(ask())
