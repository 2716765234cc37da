"""When a request to the engines that failed is sent again."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Protocol

from vime.errors import EngineError

_MAX_ATTEMPTS = 6
_FIRST_BACKOFF_S = 0.2  # doubled each time: about 6 s over all attempts
_DOUBLED_WHILE_WAITING = 3  # times: 1.6 s between two attempts that do not count
_UNAVAILABLE = 503  # no healthy engine right now
_LOST = (500, 502, _UNAVAILABLE, 504)  # what an engine that dies says, or the router for it


class Outages(Protocol):
    """What a client asks when a request failed; from its event loop, so that no answer takes long."""

    notice_s: float
    """An engine or a router that serves no longer is found out within so many seconds."""

    def check(self) -> None:
        """Raises: what ends the run, if engines or router cannot be restarted."""

    def is_under_way(self) -> bool:
        """Whether an engine or the router is being restarted."""


class Attempts:
    """The attempts of one request. Those during a restart do not count, nor those until one is found to be due.

    Args:
        url: for the error.
        counters: its "retries" are counted up.
        outages: who restarts engines and router; None where nobody does.
        most: attempts in all, those during a restart, too; default: several.
    """

    def __init__(self, url: str, counters: Counter[str], outages: Outages | None, *, most: int | None = None) -> None:
        self._url, self._counters, self._outages, self._most = url, counters, outages, most
        self._counted = self._made = 0
        self._unavailable_since: float | None = None

    def may_pass(self, status: int) -> bool:
        """Whether the same request may be answered otherwise later."""
        return status == _UNAVAILABLE if self._outages is None else status in _LOST

    async def failed(self, problem: str, status: int | None = None) -> None:
        """An attempt failed in a way that may pass; returns when it is time for the next.

        Args: status: of the answer; None: there was none.
        Raises: EngineError if it was the last; what ends the run, if no engine will come back.
        """
        if self._outages is not None:
            self._outages.check()
        self._made += 1
        if self._made == self._most:
            raise EngineError(f"{self._url} failed, and is not asked again: {problem}")
        if not self._waits_for_a_restart(status):
            self._counted += 1
        if self._counted == _MAX_ATTEMPTS:
            raise EngineError(f"{self._url} failed {_MAX_ATTEMPTS} times, last with {problem}")
        self._counters["retries"] += 1
        doubled = max(self._counted - 1, min(self._made - 1, _DOUBLED_WHILE_WAITING))
        await asyncio.sleep(_FIRST_BACKOFF_S * 2**doubled)

    def _waits_for_a_restart(self, status: int | None) -> bool:
        if self._outages is None:
            return False
        if self._outages.is_under_way():
            self._unavailable_since = None
            return True
        if status != _UNAVAILABLE:
            return False
        # An engine that is up but no longer fit fails requests long before it has been mute for the limit.
        if self._unavailable_since is None:
            self._unavailable_since = time.monotonic()
        return time.monotonic() - self._unavailable_since < self._outages.notice_s
