"""Spans as Chrome trace events, which Perfetto (https://ui.perfetto.dev) opens.

A track holds spans that nest; those that only overlap, as tools that run side by side, get a track of their own.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from vime.observability.trace import Span

Event: TypeAlias = dict[str, Any]


def name_event(pid: int, tid: int | None, name: str) -> Event:
    """What Perfetto calls a process (tid None) or one of its tracks."""
    kind = "process_name" if tid is None else "thread_name"
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid or 0, "ts": 0, "dur": 0, "args": {"name": name}}


def sort_event(pid: int, position: int) -> Event:
    """Where Perfetto puts a process, from the top."""
    args = {"sort_index": position}
    return {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "ts": 0, "dur": 0, "args": args}


def count_event(name: str, at_s: float, values: Mapping[str, float], pid: int) -> Event:
    """A point of a process's curve of several numbers, stacked."""
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": int(at_s * 1e6), "dur": 0, "args": dict(values)}


def span_event(span: Span, pid: int, tid: int) -> Event:
    """A complete event; times are whole microseconds."""
    start = int(span["start_s"] * 1e6)
    details = {k: _plain(v) for k, v in span.items() if k not in ("name", "start_s", "end_s")}
    duration = max(0, int(span["end_s"] * 1e6) - start)
    return {"ph": "X", "name": span["name"], "pid": pid, "tid": tid, "ts": start, "dur": duration, "args": details}


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def nested(spans: Iterable[Span]) -> tuple[list[Span], list[Span]]:
    """(spans that nest, in the order of their start; those that overlap one of them and belong elsewhere)."""
    inside: list[Span] = []
    outside: list[Span] = []
    ends: list[int] = []
    for span in sorted(spans, key=lambda s: (int(s["start_s"] * 1e6), -int(s["end_s"] * 1e6))):
        start, end = int(span["start_s"] * 1e6), int(span["end_s"] * 1e6)
        while ends and ends[-1] <= start:
            ends.pop()
        if ends and end > ends[-1]:
            outside.append(span)
            continue
        inside.append(span)
        ends.append(end)
    return inside, outside


class Lanes:
    """Tracks for many short-lived things: each gets the first that is free, so there are as many as run at a time."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []  # heap of (microsecond it ends, track)
        self._free: list[int] = []  # heap of tracks
        self.count = 0

    def place(self, things: Iterable[Sequence[Span]], pid: int) -> list[Event]:
        """The events of things, each a list of spans, on tracks 1 … `count` of a process."""
        parts: list[list[Span]] = []
        for spans in things:
            rest = list(spans)
            while rest:
                part, rest = nested(rest)
                parts.append(part)
        parts.sort(key=lambda part: part[0]["start_s"])
        events: list[Event] = []
        for part in parts:
            start = int(part[0]["start_s"] * 1e6)
            while self._taken and self._taken[0][0] <= start:
                heapq.heappush(self._free, heapq.heappop(self._taken)[1])
            if self._free:
                tid = heapq.heappop(self._free)
            else:
                self.count += 1
                tid = self.count
            end = max(int(span["end_s"] * 1e6) for span in part)
            heapq.heappush(self._taken, (end, tid))
            events += [span_event(span, pid, tid) for span in part]
        return events
