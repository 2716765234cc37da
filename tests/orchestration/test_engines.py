"""The fleet's end, on fakes of Ray's handles."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from vime.errors import EngineDead, WeightSyncError
from vime.orchestration.engines import EngineFleet


class Remote:
    def __init__(self, call: Callable[[], Any]) -> None:
        self.remote = lambda: call


class Worker:
    def __init__(self, alive: Callable[[], bool], stop: Callable[[], None]) -> None:
        self.is_alive, self.stop = Remote(alive), Remote(stop)


def failing(error: Exception) -> Callable[[], Any]:
    def call() -> None:
        raise error

    return call


def fleet_of(monkeypatch: pytest.MonkeyPatch, *workers: Worker) -> EngineFleet:
    monkeypatch.setattr(ray, "get", lambda call, timeout=None: call())
    fleet = object.__new__(EngineFleet)
    fleet.engines, fleet._front, fleet._keepers, fleet.roster = [], None, [], None
    fleet._workers, fleet._log_dir = list(workers), Path("logs")
    return fleet


def test_closing_asks_every_engine_and_hides_no_earlier_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []
    fleet = fleet_of(
        monkeypatch,
        Worker(lambda: True, failing(RayActorError())),
        Worker(lambda: True, failing(GetTimeoutError())),
        Worker(lambda: True, lambda: stopped.append("third")),
    )
    fleet.close()
    assert stopped == ["third"]


def test_an_engine_whose_worker_is_gone_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_of(monkeypatch, Worker(lambda: True, lambda: None), Worker(failing(RayActorError()), lambda: None))
    with pytest.raises(EngineDead, match=r"engine \[1\] of 2 is gone.*engine_1.log"):
        fleet.check_alive()
    fleet = fleet_of(monkeypatch, Worker(failing(GetTimeoutError()), lambda: None))
    with pytest.raises(EngineDead, match=r"engine \[0\] of 1 is gone"):
        fleet.check_alive()


class Well:
    """An engine that says that it is well."""

    def health(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("words", "is_sick"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes", True),
        ("/update_weights answered 500: [Errno 12] Cannot allocate memory", True),
        ("collective_rpc answered 500: MemoryError()", True),
        ("the checksum of lm_head.weight differs", False),
    ],
)
def test_an_engine_that_says_that_it_has_no_memory_is_sick(
    monkeypatch: pytest.MonkeyPatch, words: str, is_sick: bool
) -> None:
    fleet: Any = fleet_of(monkeypatch)
    fleet.engines = [Well()]
    assert fleet._is_sick(0, WeightSyncError(words)) is is_sick
