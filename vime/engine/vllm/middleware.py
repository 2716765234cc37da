"""The door of every engine: the run's key on every path but GET /health.

vLLM loads this class by name (--middleware) into its API server; its own --api-key leaves the control routes open.
The router's validator uses the same comparison. Only the standard library is imported.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

KEY_VARIABLE = "VIME_RUN_KEY"
KEY_FILE_VARIABLE = "VIME_RUN_KEY_FILE"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


def read_run_key() -> str:
    """The run's key from the environment, or from the file the environment names.

    Raises: RuntimeError if neither is set, the key is empty, or others may read the file.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    if not key and (name := os.environ.get(KEY_FILE_VARIABLE)):
        path = Path(name)
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            raise RuntimeError(
                f"{KEY_FILE_VARIABLE} names {path}, which has mode {mode:04o}; others may not read it: 0600"
            )
        key = path.read_text(encoding="utf-8").strip()
    if not key:
        raise RuntimeError(f"no run key: set {KEY_VARIABLE}, or {KEY_FILE_VARIABLE} to a file of mode 0600")
    return key


def is_authorized(authorization: bytes | None, key: str) -> bool:
    """Whether an Authorization header's value is `Bearer <key>`, compared in constant time."""
    return hmac.compare_digest(authorization or b"", b"Bearer " + key.encode())


class RunKeyMiddleware:
    """ASGI middleware that answers 401 to every request without the run's key."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._key = read_run_key()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan" or self._is_open(scope) or is_authorized(_authorization(scope), self._key):
            await self._app(scope, receive, send)
        elif kind == "websocket":
            await receive()  # websocket.connect; a close before accept makes the server answer 403
            await send({"type": "websocket.close", "code": 1008, "reason": "the run's key is missing"})
        else:
            await _refuse(send)

    @staticmethod
    def _is_open(scope: Scope) -> bool:
        return bool(scope["type"] == "http") and scope["method"] == "GET" and scope["path"] == "/health"


def _authorization(scope: Scope) -> bytes | None:
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    # Two headers could be read differently by whoever looks next; refuse them.
    return values[0] if len(values) == 1 else None


async def _refuse(send: Send) -> None:
    body = b'{"error": "the run\'s key is missing or wrong"}'
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
