"""What keeps work from the engines while their weights change: those inside are waited for, others wait outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Pulse:
    """Wakes everyone in an event loop who waits for something to change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def beat(self) -> None:
        """Something has changed."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return when it holds; it is looked at now and after every beat."""
        while not holds():
            await self._event.wait()


class Gate:
    """Open at first. Of one event loop. Order of calls: `shut`, `emptied`, `open`; `passing` at any time."""

    def __init__(self) -> None:
        self._outside, self._left = Pulse(), Pulse()
        self.is_open = True
        self.num_inside = 0

    def shut(self) -> None:
        """Nobody comes in any more."""
        self.is_open = False

    def open(self) -> None:
        """Those that wait come in."""
        self.is_open = True
        self._outside.beat()

    def look_again(self) -> None:
        """Those that wait ask whether they were called off."""
        self._outside.beat()

    async def emptied(self) -> None:
        """Return when nobody is inside."""
        await self._left.until(lambda: not self.num_inside)

    @asynccontextmanager
    async def passing(self, is_called_off: Callable[[], bool] = lambda: False) -> AsyncIterator[bool]:
        """Inside the block when the gate is open. Gives whether it is inside: not if it was called off while waiting.

        Args: is_called_off: asked before coming in, and by `look_again`.
        """
        await self._outside.until(lambda: self.is_open or is_called_off())
        if is_called_off():
            yield False
            return
        self.num_inside += 1
        try:
            yield True
        finally:
            self.num_inside -= 1
            if not self.num_inside:
                self._left.beat()
