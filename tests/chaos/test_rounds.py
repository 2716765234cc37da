"""A few rounds of chaos; `make chaos` plays as many as one wants."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.chaos import accounts
from tests.chaos.plan import Kill, Plan, Stream
from tests.chaos.round import play
from tests.chaos.task import write_task


def hit(victim: str, rollout: int) -> Kill:
    return Kill(victim, "KILL", rollout, 0.2, None)


STUBS = (
    Plan(1, "stub", "sync", False, 4, 0.05, (hit("grader", 0), hit("engine", 1))),
    Plan(2, "stub", "sync", True, 4, 0.05, (hit("validator", 0),)),
    Plan(3, "stub", "overlapped", False, 4, 0.05, (hit("rank", 1),)),
    Plan(4, "stub", "fully_async", False, 4, 0.05, (hit("driver", 1),), Stream(1, "drop", True, None)),
)
REAL = Plan(5, "vllm", "sync", False, 3, 0.0, (hit("engine", 0),))


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chaos") / "task"
    write_task(folder)
    return folder


def check_round(plan: Plan, task: Path, folder: Path) -> None:
    run_dir = folder / f"round-{plan.engine}-{plan.seed}"
    result = play(plan, task, run_dir)
    assert result.finished and not result.without_cause and not result.faults, result
    assert len(result.hits) == len(plan.kills), result
    assert accounts.check(plan, task, run_dir) == accounts.Accounts(), plan


@pytest.mark.ranks
def test_nothing_is_lost_in_four_rounds_on_stubs(task: Path, tmp_path: Path) -> None:
    """Side by side: a round waits most of the time for processes to start."""
    with ThreadPoolExecutor(len(STUBS)) as pool:
        for done in [pool.submit(check_round, plan, task, tmp_path) for plan in STUBS]:
            done.result()


@pytest.mark.engine
def test_nothing_is_lost_in_a_round_on_the_real_engine(task: Path, tmp_path: Path) -> None:
    check_round(REAL, task, tmp_path)
