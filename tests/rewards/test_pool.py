"""Whatever a grader does costs its sample and nothing else."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vime.errors import DataError, RewardError
from vime.rewards import Grade
from vime.rewards.confine import landlock_version
from vime.rewards.pool import GraderPool

BAD = "tests.rewards.bad_graders.grade"
FINE = Grade(1.0, "correct")


def start_pool(timeout_s: float) -> Iterator[GraderPool]:
    pool = GraderPool(num_workers=1, timeout_s=timeout_s, memory_limit_bytes=200 << 20)
    asyncio.run(pool.grade(BAD, "fine", "", {}))  # starts the worker
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    """With time for everything that ends, however busy the machine is."""
    yield from start_pool(120.0)


@pytest.fixture(scope="module")
def impatient_pool() -> Iterator[GraderPool]:
    """For graders that never end."""
    yield from start_pool(2.0)


def grade(pool: GraderPool, response: str, label: Any = "") -> Grade:
    return asyncio.run(pool.grade(BAD, response, label, {}))


@pytest.mark.parametrize(
    "deed",
    ["segfault", "exit", "hard exit", "raise", "recurse", "eat memory", "close everything", "garbage", "flood", "nan"],
)
def test_a_broken_grader_costs_its_sample_alone(pool: GraderPool, deed: str) -> None:
    assert grade(pool, deed) == Grade(0.0, "crashed")
    assert grade(pool, "fine") == FINE


def test_a_grader_that_returns_no_grade_has_crashed(pool: GraderPool) -> None:
    assert grade(pool, "no grade") == Grade(0.0, "crashed")


def test_what_a_grader_prints_is_not_its_answer(pool: GraderPool) -> None:
    assert grade(pool, "print") == FINE


def test_a_grader_cannot_fill_the_disk(pool: GraderPool, tmp_path: Path) -> None:
    grade(pool, "fill the disk", str(tmp_path / "big"))
    assert (tmp_path / "big").stat().st_size <= 1 << 20
    assert grade(pool, "fine") == FINE


@pytest.mark.parametrize("deed", ["hang with a child", "hang with a runaway child"])
def test_a_hung_grader_is_killed_with_its_children(impatient_pool: GraderPool, tmp_path: Path, deed: str) -> None:
    assert grade(impatient_pool, deed, str(tmp_path / "pid")) == Grade(0.0, "timeout")
    child = int((tmp_path / "pid").read_text())
    assert _is_gone(child)
    assert grade(impatient_pool, "fine") == FINE


@pytest.mark.parametrize("deed", ["leave a thread", "leave a talker", "hoard", "fork"])
def test_what_a_grader_leaves_behind_costs_no_later_sample(pool: GraderPool, deed: str) -> None:
    for _ in range(3):
        assert grade(pool, deed) == FINE
        time.sleep(0.1)
        assert grade(pool, "fine") == FINE


def test_children_that_leave_the_session_die_with_the_worker(pool: GraderPool, tmp_path: Path) -> None:
    grade(pool, "leave a child", str(tmp_path / "pid"))
    assert _is_gone(int((tmp_path / "pid").read_text()))
    assert grade(pool, "fine") == FINE


def test_graders_do_not_see_secrets_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "x")
    pool = GraderPool()
    try:
        assert grade(pool, "environment").score == 0.0
    finally:
        pool.close()


def test_a_worker_that_is_killed_while_it_loads_a_grader_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    pool = GraderPool()
    try:
        found = asyncio.run(pool.grade("tests.rewards.killed_at_first.grade", "a", "", {}))
    finally:
        pool.close()
    assert found == FINE and (tmp_path / "was-here").exists()


@pytest.mark.skipif(landlock_version() < 6, reason="this kernel has no Landlock, or an old one")
def test_graders_neither_read_nor_end_the_runs_other_processes(pool: GraderPool) -> None:
    """Whose environment holds the run's key; the pool's owner stands for them."""
    for response in ("spy", "spy with a program"):
        found = grade(pool, response)
        assert (found.score, found.verdict) == (0.0, "wrong"), response
    assert grade(pool, "kill").verdict == "crashed"
    assert grade(pool, "fine") == FINE


def test_large_responses_arrive(pool: GraderPool) -> None:
    assert grade(pool, "é" * 1_000_000) == FINE


def test_samples_wait_for_a_worker_and_time_spent_waiting_does_not_count(impatient_pool: GraderPool) -> None:
    async def many() -> list[Grade]:
        responses = ["fine", "hang", *["fine"] * 10]  # those behind wait longer than one may take
        return list(await asyncio.gather(*(impatient_pool.grade(BAD, r, "", {}) for r in responses)))

    verdicts = [g.verdict for g in asyncio.run(many())]
    assert verdicts == ["correct", "timeout", *["correct"] * 10]


def test_workers_run_side_by_side(tmp_path: Path) -> None:
    pool = GraderPool(num_workers=2, timeout_s=30.0)

    async def both() -> list[Grade]:
        return list(await asyncio.gather(*(pool.grade(BAD, "meet", str(tmp_path), {}) for _ in range(2))))

    try:
        assert asyncio.run(both()) == [FINE, FINE], "each ends when the other has begun"
    finally:
        pool.close()


def test_a_worker_killed_while_idle_is_replaced(pool: GraderPool) -> None:
    grade(pool, "fine")
    (worker,) = pool._workers
    os.kill(worker.pid, 9)
    worker._process.wait()
    assert grade(pool, "fine") == FINE


def test_graders_that_cannot_be_loaded_are_an_error_and_not_a_grade(pool: GraderPool) -> None:
    with pytest.raises(RewardError, match="no grader is called 'maths'"):
        asyncio.run(pool.grade("maths", "x", "", {}))
    with pytest.raises(RewardError, match="cannot be loaded: ModuleNotFoundError"):
        asyncio.run(pool.grade("no.such.module", "x", "", {}))
    assert not pool._workers, "no process is left behind"
    with pytest.raises(DataError, match="JSON"):
        asyncio.run(pool.grade(BAD, "x", object(), {}))
    assert grade(pool, "fine") == FINE


def test_closing_ends_workers_and_waiting_grades() -> None:
    pool = GraderPool(timeout_s=60)
    asyncio.run(pool.grade(BAD, "fine", "", {}))
    (worker,) = pool._workers

    async def close_while_hanging() -> None:
        hanging = asyncio.create_task(pool.grade(BAD, "hang", "", {}))
        queued = asyncio.create_task(pool.grade(BAD, "fine", "", {}))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(pool.close)
        for task in (hanging, queued):
            with pytest.raises((RewardError, asyncio.CancelledError)):
                await task

    asyncio.run(close_while_hanging())
    assert worker._process.poll() is not None
    with pytest.raises((RewardError, RuntimeError)):
        asyncio.run(pool.grade(BAD, "fine", "", {}))


def test_a_pool_never_used_starts_nothing() -> None:
    pool = GraderPool()
    assert asyncio.run(pool.grade("exact_match", "4", "4", {})) == FINE
    assert asyncio.run(pool.grade("math", "\\boxed{4}", "5", {})) == Grade(0.0, "wrong")
    assert not pool._workers
    pool.close()
    pool.close()


def _is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has reaped yet counts as ended."""
    for _ in range(3000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False
