"""Spans: what happened from when to when, on one clock for all processes (Unix seconds).

A sample carries its own spans (`Sample.trace`); generate functions add theirs with `span`. Trainer, weight sync and
rollout keep a `SpanLog`. `trace_file.py` writes all of them for Perfetto.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from vime.types import Sample

Span: TypeAlias = dict[str, Any]
"""{"name", "start_s", "end_s"}, Unix seconds, and details under names of their own."""

OWN_SPANS = frozenset({"waiting", "generate", "reward", "filter", "queued"})
"""What vime itself writes into a sample's trace: a place in the queue, generation (or the whole generate function),
grading, the dynamic sampling filter, a place among the finished that wait for the trainer (--fully-async). Everything
else was added by the user's functions."""
_LOG_LENGTH = 20_000


@contextmanager
def span(sample: Sample, name: str, **details: Any) -> Iterator[None]:
    """Add a span to a sample's trace, for the time the block takes; for generate functions and rewards.

        with span(sample, "tool", command="ls"):
            output = await run_tool()

    Its time counts as perf/non_generation_time. It may be awaited inside, and spans may overlap.

    Args: name: not one of OWN_SPANS. details: numbers and text, shown with the span.
    Raises: ValueError for a name that vime uses itself.
    """
    if name in OWN_SPANS:
        raise ValueError(f"a span cannot be called {name!r}: vime writes those itself ({', '.join(sorted(OWN_SPANS))})")
    start = time.time()
    try:
        yield
    finally:
        sample.trace.append({"name": name, "start_s": start, "end_s": time.time(), **details})


def add_span(samples: Iterable[Sample], name: str, start_s: float) -> None:
    """A span from `start_s` (time.time()) until now, for each of these samples."""
    end = time.time()
    for sample in samples:
        sample.trace.append({"name": name, "start_s": start_s, "end_s": end})


def seconds_outside_generation(trace: Iterable[Span], *, since_s: float = -math.inf) -> float:
    """Seconds from `since_s` on that a sample's own functions spent in spans of theirs; overlapping ones count once."""
    total, until = 0.0, since_s
    for start, end in sorted((s["start_s"], s["end_s"]) for s in trace if s["name"] not in OWN_SPANS):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


class SpanLog:
    """Spans of one process or handle until somebody takes them; the oldest are forgotten where nobody does."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._spans: deque[Span] = deque(maxlen=_LOG_LENGTH)

    @contextmanager
    def span(self, name: str, **details: Any) -> Iterator[None]:
        """A span for the time the block takes."""
        start = self._clock()
        try:
            yield
        finally:
            self._spans.append({"name": name, "start_s": start, "end_s": self._clock(), **details})

    def take(self) -> list[Span]:
        """The spans since the last call."""
        spans = list(self._spans)
        self._spans.clear()
        return spans
