import pytest

from vime.observability.timers import StageTimer


class Clock:
    """Stands still until told to move."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def spend(self, seconds):
        self.now += seconds


def test_stages_and_the_rest_add_up_to_the_step():
    clock = Clock()
    timer = StageTimer(clock)
    clock.spend(1)
    with timer.stage("rollout"):
        clock.spend(2)
    with timer.stage("train"):
        clock.spend(4)
    with timer.stage("rollout"):
        clock.spend(8)
    clock.spend(16)
    expected = {"perf/rollout_time": 10, "perf/train_time": 4, "perf/other_time": 17, "perf/step_time": 31}
    assert timer.metrics() == expected


def test_a_nested_stage_counts_once():
    clock = Clock()
    timer = StageTimer(clock)
    with timer.stage("train"):
        clock.spend(1)
        with timer.stage("save_model"):
            clock.spend(2)
        clock.spend(4)
    metrics = timer.metrics()
    assert (metrics["perf/train_time"], metrics["perf/save_model_time"], metrics["perf/step_time"]) == (5, 2, 7)
    assert metrics["perf/other_time"] == 0


def test_a_stage_that_raises_is_timed_and_closed():
    clock = Clock()
    timer = StageTimer(clock)
    with pytest.raises(RuntimeError), timer.stage("train"):
        clock.spend(3)
        raise RuntimeError
    clock.spend(1)
    assert timer.metrics()["perf/train_time"] == 3 and timer.metrics()["perf/other_time"] == 1


def test_a_step_that_began_where_the_last_one_ended_leaves_no_time_out():
    clock = Clock()
    first = StageTimer(clock)
    clock.spend(1)
    assert first.metrics()["perf/step_time"] == 1
    clock.spend(2)  # metrics are written
    second = StageTimer(clock, start=first.end)
    with second.stage("train"):
        clock.spend(4)
    assert second.metrics() == {"perf/train_time": 4, "perf/other_time": 2, "perf/step_time": 6}
