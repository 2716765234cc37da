"""Where the seconds go from the start of the program to its first step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from vime.observability.timers import StageTimer
from vime.types import Metrics


class StartTimes:
    """Times the parts of a start as the driver waits for them, so that they add up. For one thread.

    Engines and trainer start beside the driver: what it does meanwhile is a part of its own, and the wait for them is
    only what is left.

        times = StartTimes()
        with times.part("engines"):
            ...
        times.metrics()  # start/engines_s, start/other_s, start/total_s
    """

    def __init__(self, begin: float | None = None, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """Args: begin: on the clock, when the program started; None for now."""
        self._timer = StageTimer(clock, start=begin)

    def part(self, name: str) -> AbstractContextManager[None]:
        """Time a part; one that is entered again adds up."""
        return self._timer.stage(name)

    def metrics(self, last_stages: Mapping[str, float] | None = None) -> Metrics:
        """start/<part>_s, start/other_s and start/total_s up to now, in seconds.

        Args: last_stages: perf/<stage>_time of what was timed elsewhere and belongs to the start.
        """
        total = self._timer.metrics()
        stages = {**total, **(last_stages or {})}
        parts = {
            f"start/{name.removeprefix('perf/').removesuffix('_time')}_s": seconds
            for name, seconds in stages.items()
            if name not in ("perf/step_time", "perf/other_time")
        }
        whole = total["perf/step_time"]
        return parts | {"start/other_s": max(whole - sum(parts.values()), 0.0), "start/total_s": whole}


def start_line(metrics: Mapping[str, float]) -> str:
    """The start in one line, the longest part first; nothing of what took less than 0.1 s.

    start took 93 s: engines 48.1, trainer 14.0, imports 9.5, ray 5.2, update_weights 4.8
    """
    parts = {n.removeprefix("start/").removesuffix("_s"): s for n, s in metrics.items() if n.startswith("start/")}
    total = parts.pop("total")
    longest = sorted(parts.items(), key=lambda item: -item[1])
    return f"start took {total:.0f} s: " + ", ".join(
        f"{name} {seconds:.1f}" for name, seconds in longest if seconds >= 0.1
    )
