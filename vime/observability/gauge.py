"""A number that goes up and down: its mean over time, and its largest value, between two readings."""

from __future__ import annotations

import time
from collections.abc import Callable


class Gauge:
    """For one thread. `put` whenever it changes, `take` for what it was since the last `take`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._value = self._max = self._area = 0.0
        self._since = self._begin = clock()

    def put(self, value: float) -> None:
        """It is this from now on."""
        now = self._clock()
        self._area += self._value * (now - self._since)
        self._since, self._value, self._max = now, value, max(self._max, value)

    def take(self) -> tuple[float, float]:
        """(mean over the time since the last call, maximum)."""
        self.put(self._value)
        seconds = self._since - self._begin
        mean = self._area / seconds if seconds > 0 else self._value
        result = mean, self._max
        self._area, self._begin, self._max = 0.0, self._since, self._value
        return result
