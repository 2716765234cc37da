"""The key check itself, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from vime.engine.vllm.middleware import RunKeyMiddleware, is_authorized, read_run_key

KEY = "k" * 20


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "reached"})


def call(scope: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[MutableMapping[str, Any]]:
    """What is sent for a request: {"type": "reached"} if the application saw it."""
    monkeypatch.setenv("VIME_RUN_KEY", KEY)
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    asyncio.run(RunKeyMiddleware(app)({"headers": [], "method": "GET", **scope}, receive, send))
    return sent


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


@pytest.mark.parametrize(
    ("scope", "reaches"),
    [
        ({"type": "http", "path": "/health"}, True),
        ({"type": "http", "path": "/health", "method": "POST"}, False),
        ({"type": "http", "path": "/health/"}, False),
        ({"type": "http", "path": "/v1/models"}, False),
        ({"type": "http", "path": "/pause", "method": "POST"}, False),
        ({"type": "http", "path": "/pause", "headers": bearer("wrong")}, False),
        ({"type": "http", "path": "/pause", "headers": bearer(KEY + "x")}, False),
        ({"type": "http", "path": "/pause", "headers": [(b"authorization", KEY.encode())]}, False),
        ({"type": "http", "path": "/pause", "headers": bearer(KEY)}, True),
        ({"type": "http", "path": "/pause", "headers": bearer("wrong") + bearer(KEY)}, False),
        ({"type": "websocket", "path": "/v1/realtime"}, False),
        ({"type": "websocket", "path": "/health"}, False),
        ({"type": "websocket", "path": "/v1/realtime", "headers": bearer(KEY)}, True),
        ({"type": "lifespan"}, True),
    ],
)
def test_only_the_key_and_an_engines_health_pass(
    scope: dict[str, Any], reaches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = call(scope, monkeypatch)
    if reaches:
        assert sent == [{"type": "reached"}]
    elif scope["type"] == "http":
        assert sent[0]["status"] == 401
    else:
        assert sent[0]["type"] == "websocket.close"


def test_a_key_that_is_not_ascii_is_compared_not_crashed_on() -> None:
    assert not is_authorized("Bearer schlüssel".encode("latin-1"), KEY)
    assert not is_authorized(None, KEY)


def test_no_key_refuses_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VIME_RUN_KEY", raising=False)
    monkeypatch.delenv("VIME_RUN_KEY_FILE", raising=False)
    with pytest.raises(RuntimeError, match="no run key"):
        RunKeyMiddleware(app)


def test_the_key_may_come_from_a_file_only_its_owner_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    monkeypatch.delenv("VIME_RUN_KEY", raising=False)
    monkeypatch.setenv("VIME_RUN_KEY_FILE", str(file))
    file.chmod(0o644)
    with pytest.raises(RuntimeError, match="0644"):
        read_run_key()
    file.chmod(0o600)
    assert read_run_key() == KEY
