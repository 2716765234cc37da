"""A function that blocks the event loop is named. The clock is the tests' own: a busy machine changes nothing."""

import asyncio
import threading
import time

import pytest

from vime.rollout.watch import LoopWatch


class Clock:
    """Moves when told to; knows which threads have read it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.readers: set[int] = set()

    def __call__(self) -> float:
        self.readers.add(threading.get_ident())
        return self.now


def blocks(clock: Clock, seconds: float, caplog: pytest.LogCaptureFixture) -> None:
    clock.now += seconds
    end = time.monotonic() + 60
    while not caplog.records:
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_blocking_call_is_named_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()

    async def run() -> None:
        async with LoopWatch(0.02, clock):
            blocks(clock, 7.0, caplog)

    asyncio.run(run())
    message = caplog.records[0].getMessage()
    assert "has stood still for 7 s in" in message
    assert "tests/rollout/test_watch.py, line " in message and message.split(":")[0].endswith("in blocks")


def test_waiting_is_not_blocking(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()

    async def run() -> None:
        async with LoopWatch(0.02, clock) as watch:
            for _ in range(10):  # ten times the limit, in steps below it, with a sign of life in each
                clock.now += 0.019
                while watch.last_beat < clock.now:
                    await asyncio.sleep(0.001)
                clock.readers.clear()
                while not clock.readers - {threading.get_ident()}:  # the watch has looked
                    await asyncio.sleep(0.001)

    asyncio.run(run())
    assert not caplog.records
