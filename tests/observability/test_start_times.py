"""Where the seconds of a start go."""

from __future__ import annotations

import pytest

from vime.observability.start_times import StartTimes, start_line


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_parts_add_up_to_the_time_since_the_program_began() -> None:
    clock = Clock(12.0)
    times = StartTimes(10.0, clock=clock)
    with times.part("engines"):
        clock.now += 30
        with times.part("data"):
            clock.now += 5
    clock.now += 4
    with times.part("data"):
        clock.now += 1
    clock.now += 3  # the loop's own setup: a weight sync of two seconds
    metrics = times.metrics({"perf/update_weights_time": 2.0, "perf/other_time": 1.0, "perf/step_time": 3.0})
    assert metrics == pytest.approx(
        {
            "start/engines_s": 30.0,
            "start/data_s": 6.0,
            "start/update_weights_s": 2.0,
            "start/other_s": 7.0,
            "start/total_s": 45.0,
        }
    )


def test_the_line_has_the_longest_part_first_and_nothing_that_took_no_time() -> None:
    metrics = {"start/ray_s": 5.2, "start/engines_s": 48.1, "start/data_s": 0.04, "start/total_s": 53.4}
    assert start_line(metrics) == "start took 53 s: engines 48.1, ray 5.2"
