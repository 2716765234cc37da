"""An event loop in a thread of its own, which others hand work to and wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Order of calls: `call` as often as wanted, then `close`. What its tasks share needs no lock.

    Args: name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon: a user's function that never returns must not keep the program from ending.
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """What it returns. Raises: what it raises; TimeoutError if that takes longer, and it is cancelled then."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except BaseException:  # ctrl-C, too: nobody waits for it any more
            future.cancel()
            raise

    def close(self, timeout_s: float) -> bool:
        """End the loop and its thread. Returns: whether it has ended; one that cannot be stopped is left behind."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._loop.close()
        return True
