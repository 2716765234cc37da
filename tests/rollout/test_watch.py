"""A function that blocks the event loop is named."""

import asyncio
import time

import pytest

from vime.rollout.watch import LoopWatch


def blocks(seconds: float) -> None:
    time.sleep(seconds)


async def run(limit_s: float, blocking_s: float, waiting_s: float) -> None:
    async with LoopWatch(limit_s):
        await asyncio.sleep(waiting_s)
        blocks(blocking_s)
        await asyncio.sleep(0)


def test_a_blocking_call_is_named_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(run(0.1, blocking_s=0.25, waiting_s=0.0))
    record, *_ = caplog.records
    assert "has stood still for 0 s in" in record.getMessage()
    assert "tests/rollout/test_watch.py, line 12, in blocks" in record.getMessage()


def test_waiting_is_not_blocking(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(run(0.2, blocking_s=0.0, waiting_s=0.5))
    assert not caplog.records
