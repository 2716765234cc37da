"""The trace of a run, for Perfetto: the loop's stages, ranks that train, engines, and a track for each sample."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vime.observability.chrome_trace import Event, Lanes, count_event, name_event, sort_event
from vime.observability.trace import Span
from vime.observability.writers import write_whole
from vime.types import Group, Sample

_log = logging.getLogger(__name__)

_END = b"\n]\n"
_PROCESSES = ("loop", "trainer", "critic", "engines", "samples", "held-out samples")


class TraceFile:
    """A JSON array of events that is whole after every `append`, so that it opens while the run goes on.

    Args: max_bytes: what would go beyond it is left out, and said once.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._is_full = False
        self._is_empty = True
        self._file = open(path, "wb", buffering=0)
        write_whole(self._file, 0, b"[", tail=_END)

    def append(self, events: Sequence[Event]) -> None:
        """Add events, or none of them when they do not fit. Raises: OSError (a full disk)."""
        if self._is_full or not events:
            return
        text = json.dumps(list(events), separators=(",", ":"), default=str)[1:-1].encode()
        place = self._file.seek(0, 2) - len(_END)
        if place + len(text) > self._max_bytes:
            self._is_full = True
            _log.warning("%s has reached --trace-max-mib; later steps are not traced", self._path)
            return
        write_whole(self._file, place, (b"\n" if self._is_empty else b",\n") + text, tail=_END)
        self._is_empty = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RunTracer:
    """Writes one step after the other. Made once per run.

    Args:
        file: where to.
        sources: process ("trainer", "critic", "engines") -> a call that gives the spans since the last one, a list for
            each rank or engine.
    """

    def __init__(self, file: TraceFile, sources: Mapping[str, Callable[[], Sequence[Sequence[Span]]]]) -> None:
        if unknown := set(sources) - set(_PROCESSES):
            raise ValueError(f"a trace has the processes {_PROCESSES}, not {sorted(unknown)}")
        self._file, self._sources = file, sources
        self._lanes: dict[tuple[int, int], Lanes] = {}
        self._named: set[int] = set()

    def step(
        self,
        stages: Sequence[Span],
        groups: Sequence[Group] = (),
        evaluated: Sequence[Group] = (),
        *,
        beside: Sequence[Span] = (),
        counts: Sequence[tuple[float, Mapping[str, float]]] = (),
        **details: int,
    ) -> None:
        """Write a step: its stages, what the sources have, and the samples that were trained on or evaluated.

        Samples whose life ended before the step, and what ran beside it, began are left out: they were read from
        another run's files.

        Args:
            beside: what ran beside the stages, perhaps since an earlier step: the generation of its rollout.
            counts: (Unix time, groups by place), drawn as a curve of the loop.
        """
        loop = [*stages]
        since = min((s["start_s"] for s in stages), default=0.0)
        if stages:
            end = max(s["end_s"] for s in stages)
            loop.append({"name": "step", "start_s": since, "end_s": end, **details})
        events = self._tracks("loop", [loop, beside] if beside else [loop])
        events += [count_event("groups", at_s, values, _PROCESSES.index("loop") + 1) for at_s, values in counts]
        since = min([since, *(s["start_s"] for s in beside)])
        for process, take in self._sources.items():
            events += self._tracks(process, take())
        events += self._samples("samples", groups, since) + self._samples("held-out samples", evaluated, since)
        self._file.append(events)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _tracks(self, process: str, spans_of: Sequence[Sequence[Span]]) -> list[Event]:
        """Events of a process with a fixed number of actors, each with tracks of its own."""
        pid = _PROCESSES.index(process) + 1
        events: list[Event] = []
        for number, spans in enumerate(spans_of):
            # Room for overlapping spans of one actor beside it.
            lanes = self._lanes.setdefault((pid, number), Lanes())
            before = lanes.count
            placed = lanes.place([spans] if spans else [], pid)
            base = number * 100
            for event in placed:
                event["tid"] += base
            names = {
                "loop": ("stages", "generation")[min(number, 1)],
                "trainer": f"rank {number}",
                "critic": f"critic rank {number}",
                "engines": f"engine {number}",
            }
            events += self._new(pid, process)
            events += [
                name_event(pid, base + tid, names[process] + (f" ({tid})" if tid > 1 else ""))
                for tid in range(before + 1, lanes.count + 1)
            ]
            events += placed
        return events

    def _samples(self, process: str, groups: Sequence[Group], since: float) -> list[Event]:
        pid = _PROCESSES.index(process) + 1
        lanes = self._lanes.setdefault((pid, 0), Lanes())
        before = lanes.count
        samples = [s for g in groups for s in g.samples if any(span["end_s"] >= since for span in s.trace)]
        placed = lanes.place(map(_life, samples), pid)
        if not placed:
            return []
        names = [name_event(pid, tid, f"lane {tid}") for tid in range(before + 1, lanes.count + 1)]
        return self._new(pid, process) + names + placed

    def _new(self, pid: int, process: str) -> list[Event]:
        """The name of a process that had no event yet."""
        if pid in self._named:
            return []
        self._named.add(pid)
        return [name_event(pid, None, process), sort_event(pid, pid)]


def _life(sample: Sample) -> list[Span]:
    """A sample's spans inside one that holds them all and says which sample it is."""
    whole: Span = {
        "name": f"sample {sample.sample_id}",
        "start_s": min(span["start_s"] for span in sample.trace),
        "end_s": max(span["end_s"] for span in sample.trace),
        "group_id": sample.group_id,
        "response_length": sample.response_length,
        "status": str(sample.status),
        "reward": sample.reward,
    }
    return [whole, *sample.trace]
