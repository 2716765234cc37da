"""Requests to an engine's server that are given up when it has died."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

import httpx

from vime.errors import EngineDead

_LOOK_S = 5.0  # between two looks at whether an engine that has not answered yet still listens


def watched(request: Callable[[], httpx.Response], url: str) -> httpx.Response:
    """The answer to a request, given up when nobody listens at the engine's address any more.

    When vLLM's engine core dies, its server closes its port and then waits for open connections, for ever: without a
    look from outside, both sides would wait for each other until the time is up.

    Args: url: the engine's.
    Raises: EngineDead if the engine died meanwhile; whatever the request raises.
    """
    done: Future[httpx.Response] = Future()

    def run() -> None:
        try:
            done.set_result(request())
        except BaseException as error:
            done.set_exception(error)

    # Not a pool: a request that is given up ends with the server's process, and nothing may wait for it.
    threading.Thread(target=run, name="engine-call", daemon=True).start()
    while True:
        try:
            return done.result(timeout=_LOOK_S)
        except FutureTimeout:
            if done.done():
                return done.result()
            _check_listening(url)


def _check_listening(url: str) -> None:
    parsed = httpx.URL(url)
    try:
        socket.create_connection((parsed.host, parsed.port or 80), timeout=_LOOK_S).close()
    except ConnectionRefusedError as error:
        raise EngineDead(
            f"{url} closed its port while a request was open: its engine core died; the engine's log says why"
        ) from error
    except OSError:
        pass  # busy, or not to be reached right now: the request's own time limit decides
