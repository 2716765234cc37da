"""The router in front of a run's engines, whichever serve right now."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from vime.engine.vllm.client import RouterClient
from vime.engine.vllm.router import RouterProcess
from vime.errors import EngineError

_log = logging.getLogger(__name__)


class Front:
    """The router and those who use it: the engines behind it, and the client that is told where it is.

    Args:
        make: a router for these engines, not started yet.
        router: the one that serves now.
        urls: of the engines behind it.
    """

    def __init__(
        self, make: Callable[[Sequence[str]], RouterProcess], router: RouterProcess, urls: Sequence[str]
    ) -> None:
        self._make, self._router = make, router
        self._changed = threading.Condition()
        self._urls = set(urls)
        self._serves, self._is_closed = True, False
        self.client: RouterClient | None = None
        self.on_trouble: Callable[[str], None] = _log.warning
        """Told when the router, which is alive, does not take an engine, or waits for one that nobody can end."""

    @property
    def router(self) -> RouterProcess:
        """The one that serves, or served last."""
        return self._router

    def add(self, url: str) -> None:
        """An engine serves."""
        self._change(self._urls.add, url)

    def remove(self, url: str) -> None:
        """An engine does not, or not for long."""
        self._change(self._urls.discard, url)

    def restart(self) -> None:
        """A new router in front of the engines there are; waits for one. Raises: EngineError."""
        with self._changed:
            self._changed.wait_for(lambda: self._urls or self._is_closed)
            if self._is_closed:
                return
            router = self._router = self._make(sorted(self._urls))
        router.start()
        with self._changed:
            is_closed = self._is_closed
        if is_closed:
            router.stop()  # `close` came before there was a process to end
            return
        router.wait_ready()
        with self._changed:
            router.set_engines(self._urls)  # what has come and gone meanwhile
            self._serves = True
            self._tell()

    def end(self) -> None:
        """End the router, which failed; until `restart` the engines that come and go are only noted."""
        with self._changed:
            self._serves = False
        self._router.stop(grace_s=1.0)

    def close(self) -> None:
        """End the router, and whoever waits for one."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._router.stop()

    def _change(self, change: Callable[[str], None], url: str) -> None:
        with self._changed:
            change(url)
            self._changed.notify_all()
            if not self._serves:
                return  # the next one begins with the engines there are then
            self._tell()
            try:
                self._router.set_engines(self._urls)
            except EngineError as error:
                self.on_trouble(str(error))

    def _tell(self) -> None:
        if self.client is not None:
            self.client.set_addresses(self._router.url, sorted(self._urls))
