"""How long at least one of several overlapping pieces of work ran."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Activity:
    """Time with something under way, however much of it, in whichever threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._running = 0
        self._since = self._busy_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Something is under way inside the block."""
        with self._lock:
            if not self._running:
                self._since = self._clock()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._busy_s += self._clock() - self._since

    @property
    def busy_s(self) -> float:
        """Seconds so far, those of work that still runs included."""
        with self._lock:
            return self._busy_s + (self._clock() - self._since if self._running else 0.0)
