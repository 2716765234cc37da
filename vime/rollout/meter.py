"""Measures a rollout from outside: whichever rollout function runs, its tokens, engines and samples count alike."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vime.observability.activity import Activity
from vime.observability.engine_stats import EngineStats, engine_metrics, total
from vime.observability.trace import Span
from vime.rollout.sample_metrics import sample_metrics
from vime.types import Group, Metrics

_SPANS_KEPT = 100  # rollouts, where nobody takes their spans


@dataclass(frozen=True, slots=True)
class Reading:
    """What `RolloutMeter.start` saw."""

    time_s: float
    stats: Sequence[EngineStats] | None
    busy_s: float


class RolloutMeter:
    """`start` before a rollout, `finish` after it.

    Args:
        read_stats: one reading per engine; None when an engine did not answer.
        num_requests: a number that rises with every request to an engine, by whomever.
        activity: of the client that sends requests.
        num_devices: of all engines.
        reward_key: the entry of a dict reward that is trained on.
        take_counts: further metrics, of what was counted since the last call.
    """

    def __init__(
        self,
        *,
        read_stats: Callable[[], Sequence[EngineStats] | None],
        num_requests: Callable[[], int],
        activity: Activity,
        num_devices: int,
        reward_key: str | None,
        take_counts: Callable[[], Metrics] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read_stats, self._activity, self._num_devices = read_stats, activity, num_devices
        self._reward_key, self._clock = reward_key, clock
        self._num_requests, self._take_counts = num_requests, take_counts
        self._last: tuple[int, Sequence[EngineStats] | None] = (-1, None)  # requests so far, and the reading then
        self._spans: deque[list[Span]] = deque(maxlen=_SPANS_KEPT)

    def start(self) -> Reading:
        """Before the rollout function is called. Engines that nobody used since the last reading are not asked: it
        takes some milliseconds."""
        requests, stats = self._last
        if stats is None or requests != self._num_requests():
            stats = self._read_stats()
        return Reading(self._clock(), stats, self._activity.busy_s)

    def finish(self, begin: Reading, groups: Sequence[Group]) -> Metrics:
        """After it has returned these groups."""
        return self.turn(begin, groups)[0]

    def turn(self, begin: Reading, groups: Sequence[Group]) -> tuple[Metrics, Reading]:
        """`finish`, and the `start` of what follows at once, where generation never stops."""
        now, busy_s = self._clock(), self._activity.busy_s
        seconds, now_s = now - begin.time_s, time.time()
        metrics = sample_metrics(
            groups,
            begin_s=now_s - seconds,
            seconds=seconds,
            num_devices=self._num_devices,
            reward_key=self._reward_key,
        )
        metrics |= self._take_counts()
        metrics["perf/engine_busy_s"] = busy_s - begin.busy_s
        stats = self._read_stats()
        self._last = (self._num_requests(), stats)
        if begin.stats is not None and stats is not None:
            metrics |= engine_metrics(begin.stats, stats, seconds)
            each = [late.since(early) for early, late in zip(begin.stats, stats, strict=True)]
            metrics["perf/tokens_per_gpu_per_sec"] = total(each).sampled_tokens / (seconds * self._num_devices)
            self._spans.append([_span(done, now_s, seconds) for done in each])
        return metrics, Reading(now, stats, busy_s)

    def take_spans(self) -> list[list[Span]]:
        """What each engine did in the rollouts since the last call; for the trace."""
        # One by one: the next rollout may end in another thread meanwhile.
        taken = [self._spans.popleft() for _ in range(len(self._spans))]
        return [list(of_engine) for of_engine in zip(*taken, strict=True)]


def _span(done: EngineStats, end_s: float, seconds: float) -> Span:
    """A rollout as one engine saw it."""
    return {
        "name": "rollout",
        "start_s": end_s - seconds,
        "end_s": end_s,
        "responses": done.num_requests,
        "sampled_tokens": done.sampled_tokens,
        "running_requests": done.running_s / seconds,
        "preemptions": done.num_preemptions,
    }
