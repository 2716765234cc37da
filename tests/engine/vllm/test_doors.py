"""Nobody gets in without the run's key: engines and router, route by route."""

from __future__ import annotations

import base64
import itertools
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from vime.engine.vllm.router import RouterProcess
from vime.engine.vllm.server import EngineServer

pytestmark = pytest.mark.engine

NO_KEYS: tuple[dict[str, str], ...] = ({}, {"Authorization": "Bearer wrong"}, {"X-API-Key": "the-key-of-the-tests"})

# Routes that matter and may be missing from the engine's own list.
ENGINE_ROUTES = {
    ("post", "/pause"),
    ("post", "/resume"),
    ("get", "/is_paused"),
    ("post", "/collective_rpc"),
    ("post", "/update_weights"),
    ("post", "/abort_requests"),
    ("post", "/reset_prefix_cache"),
    ("post", "/sleep"),
    ("get", "/server_info"),
    ("post", "/health"),
    ("get", "/health/"),
    ("get", "//health"),
    ("get", "/metrics"),
    ("get", "/docs"),
    ("get", "/openapi.json"),
    ("get", "/ping"),
    ("post", "/invocations"),
    ("options", "/v1/models"),
    ("get", "/no-such-path"),
}

# (method, path, JSON body): every route of vllm-router 0.1.17, and two it would proxy.
ROUTER_ROUTES: tuple[tuple[str, str, dict[str, object] | None], ...] = (
    ("get", "/health", None),
    ("get", "/liveness", None),
    ("get", "/readiness", None),
    ("get", "/health_generate", None),
    ("get", "/workers", None),
    ("post", "/workers", {"url": "http://127.0.0.1:1"}),
    ("delete", "/workers/http%3A%2F%2F127.0.0.1%3A1", None),
    ("get", "/list_workers", None),
    ("post", "/add_worker?url=http://127.0.0.1:1", None),
    ("post", "/remove_worker?url=http://127.0.0.1:1", None),
    ("get", "/get_loads", None),
    ("get", "/get_server_info", None),
    ("get", "/get_model_info", None),
    ("post", "/flush_cache", None),
    ("get", "/v1/models", None),
    ("post", "/generate", {"text": "a"}),
    ("post", "/inference/v1/generate", {"token_ids": [1], "sampling_params": {}}),
    ("post", "/v1/completions", {"model": "policy", "prompt": "a"}),
    ("post", "/v1/chat/completions", {"model": "policy", "messages": [{"role": "user", "content": "a"}]}),
    ("post", "/v1/responses", {"model": "policy", "input": "a"}),
    ("get", "/v1/responses/abc", None),
    ("post", "/v1/embeddings", {"model": "policy", "input": "a"}),
    ("post", "/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("post", "/pause", None),
    ("get", "/no-such-path", None),
)


@pytest.fixture(scope="module")
def router(engine: EngineServer, run_key: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    process = RouterProcess(
        [engine.url], settings={}, key=run_key, log_path=tmp_path_factory.mktemp("router") / "router.log"
    )
    process.start()
    process.wait_ready()
    yield process
    process.stop()


def test_every_route_of_an_engine_but_its_health_demands_the_key(engine: EngineServer, run_key: str) -> None:
    with httpx.Client(base_url=engine.url, timeout=30) as http:
        listed = http.get("/openapi.json", headers={"Authorization": f"Bearer {run_key}"}).json()["paths"]
        routes = {(method, path) for path, methods in listed.items() for method in methods} | ENGINE_ROUTES
        routes.discard(("get", "/health"))
        assert len(routes) > 40
        for (method, path), headers in itertools.product(sorted(routes), NO_KEYS):
            assert http.request(method, path, headers=headers).status_code == 401, (method, path, headers)
        assert http.get("/health").status_code == 200


def test_every_route_of_the_router_demands_the_key(router: RouterProcess, run_key: str) -> None:
    with httpx.Client(base_url=router.url, timeout=30) as http:
        for (method, path, body), headers in itertools.product(ROUTER_ROUTES, NO_KEYS):
            assert http.request(method, path, json=body, headers=headers).status_code == 401, (method, path, headers)
        assert http.get("/health", headers={"Authorization": f"Bearer {run_key}"}).status_code == 200
        assert len(http.get("/workers", headers={"Authorization": f"Bearer {run_key}"}).json()["workers"]) == 1


class Touches:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mknod, (self._path,)


def test_pickles_are_read_from_nobody_not_even_with_the_key(engine: EngineServer, run_key: str, tmp_path: Path) -> None:
    """vLLM's own transfer engines and prompt embeddings would unpickle what these bring."""
    marker = tmp_path / "ran"
    raw = pickle.dumps(Touches(marker))
    text = base64.b64encode(raw).decode()
    generate = {"model": "policy", "max_tokens": 1}
    hashes = {"token_ids": [1], "sampling_params": {}, "features": {"mm_hashes": text}}
    offers: list[tuple[str, dict[str, Any]]] = [
        ("/update_weights", {"content": raw}),
        ("/update_weights", {"json": {"update_info": {"ipc_handles_pickled": text}}}),
        ("/update_weights", {"json": {"update_info": {"names": ["a"], "ipc_handles_pickled": text, "version": 1}}}),
        ("/init_weight_transfer_engine", {"json": {"init_info": {"transport": "pickle", "version": 1, "data": text}}}),
        ("/init_weight_transfer_engine", {"content": raw}),
        ("/collective_rpc", {"content": raw}),
        ("/collective_rpc", {"json": {"method": text}}),
        ("/v1/completions", {"json": {**generate, "prompt": "a", "prompt_embeds": text}}),
        ("/inference/v1/generate", {"json": hashes}),
        ("/inference/v1/generate", {"content": raw}),
    ]
    headers = {"Authorization": f"Bearer {run_key}"}
    # vLLM closes a connection after an error, which one that is used again finds out too late.
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=engine.url, timeout=60, headers=headers, limits=limits) as http:
        for path, body in offers:
            for kind in ("application/json", "application/octet-stream"):
                answer = http.post(path, **body, headers={"content-type": kind})
                assert 400 <= answer.status_code < 600, (path, body, answer.text)
                assert not marker.exists(), (path, body)
        assert http.get("/health").status_code == 200
        answer = http.post("/v1/completions", json={**generate, "prompt": [1, 2]})
        assert answer.status_code == 200, answer.text
    pickle.loads(raw)
    assert marker.exists(), "what was offered would not have shown that it was read"


def test_the_key_is_in_no_command_line_and_no_log(engine: EngineServer, router: RouterProcess, run_key: str) -> None:
    for pid in (engine.pid, router.pid):
        assert run_key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    for log in (engine.log_path, router.log_path):
        assert run_key not in log.read_text(errors="replace")


def test_everything_listens_on_the_loopback_address_alone(engine: EngineServer, router: RouterProcess) -> None:
    assert engine.pid is not None and router.pid is not None
    addresses = listening_addresses({engine.pid, router.pid})
    assert len(addresses) >= 2
    assert set(addresses) == {"127.0.0.1"}


def listening_addresses(groups: set[int]) -> list[str]:
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) in groups:
                found += [c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        except (psutil.Error, ProcessLookupError):
            continue
    return found
