"""Means over time."""

from vime.observability.gauge import Gauge


def test_the_mean_is_over_time_and_each_reading_begins_anew() -> None:
    now = [10.0]
    gauge = Gauge(lambda: now[0])
    for value, seconds in ((4, 1.0), (0, 2.0), (2, 1.0)):
        gauge.put(value)
        now[0] += seconds
    assert gauge.take() == (6 / 4, 4)
    assert gauge.take() == (2, 2), "no time has passed: what it is now"
    now[0] += 3
    gauge.put(1)
    now[0] += 1
    assert gauge.take() == ((2 * 3 + 1) / 4, 2)
