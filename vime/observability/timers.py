"""Stage times that add up to the step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vime.types import Metrics


class StageTimer:
    """Times the stages of one step, from its construction to `metrics()`. For one thread.

    Every moment belongs to exactly one stage: inside a nested stage the outer one stands still. So
    step_time = sum of the stages + other_time, exactly.

        timer = StageTimer()
        with timer.stage("rollout"):
            ...
        timer.metrics()  # perf/rollout_time, perf/other_time, perf/step_time
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, start: float | None = None) -> None:
        """Args: start: on the clock, where the step began earlier: when the step before it ended."""
        self._clock = clock
        self._start = self._mark = clock() if start is None else start
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; a stage that is entered again adds up. Its time counts also if it raises."""
        self._charge()
        self._open.append(name)
        self._seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    @property
    def end(self) -> float:
        """The moment of the last `metrics()`, on the clock."""
        return self._mark

    def metrics(self) -> Metrics:
        """perf/<stage>_time, perf/other_time and perf/step_time up to now, in seconds."""
        self._charge()
        total = self._mark - self._start
        stages = {f"perf/{name}_time": seconds for name, seconds in self._seconds.items()}
        return stages | {"perf/other_time": max(total - sum(stages.values()), 0.0), "perf/step_time": total}

    def _charge(self) -> None:
        """Book the time since the last mark on the innermost open stage."""
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] += now - self._mark
        self._mark = now
