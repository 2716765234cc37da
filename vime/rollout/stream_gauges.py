"""How many groups of a stream are where, and when its engines generated."""

from __future__ import annotations

import time
from collections import deque

from vime.observability.gauge import Gauge
from vime.observability.trace import Span
from vime.types import Metrics

_PLACES = ("generating", "scoring", "finished")
_KEPT = 20_000  # entries for the trace, where nobody takes them


class StreamGauges:
    """For one thread; what is for the trace may be taken from another."""

    def __init__(self) -> None:
        self._gauges = {place: Gauge() for place in _PLACES}
        self._counts: deque[tuple[float, dict[str, float]]] = deque(maxlen=_KEPT)
        self._spans: deque[Span] = deque(maxlen=_KEPT)
        self._open: Span | None = None

    def put(self, **counts: int) -> None:
        """So many groups are in each of the places."""
        for place, count in counts.items():
            self._gauges[place].put(count)
        self._counts.append((time.time(), {place: float(count) for place, count in counts.items()}))

    def metrics(self) -> Metrics:
        """Means over time and maxima since the last call."""
        taken = {place: gauge.take() for place, gauge in self._gauges.items()}
        means: Metrics = {f"stream/{place}_groups/mean": mean for place, (mean, _) in taken.items()}
        return means | {f"stream/{place}_groups/max": largest for place, (_, largest) in taken.items()}

    def begin_span(self, version: int) -> None:
        """Engines generate with the weights of this version."""
        self.end_span()
        self._open = {"name": f"version {version}", "start_s": time.time(), "end_s": 0.0}

    def end_span(self) -> None:
        """They do not any more."""
        if self._open is not None:
            self._spans.append({**self._open, "end_s": time.time()})
            self._open = None

    def take_spans(self) -> list[Span]:
        """The spans that have ended since the last call."""
        return [self._spans.popleft() for _ in range(len(self._spans))]

    def take_counts(self) -> list[tuple[float, dict[str, float]]]:
        """(Unix time, groups by place) since the last call."""
        return [self._counts.popleft() for _ in range(len(self._counts))]
