"""The router unwatched, and when the run ends while it starts; engines on a node that leaves, and engines of others."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from vime.config import Config, FaultConfig
from vime.orchestration import lives
from vime.orchestration.engines import EngineFleet
from vime.orchestration.external import ExternalFleet
from vime.orchestration.front import Front
from vime.orchestration.keeper import NodeLeft
from vime.orchestration.lives import EngineLife, RouterLife


def test_a_router_that_cannot_be_watched_has_failed() -> None:
    class Router:
        def until_failure(self, **limits: Any) -> str:
            raise FileNotFoundError("router.log")

        def memory_bytes(self) -> int:
            return 0

    router: Any = Router()
    life = RouterLife(Front(lambda urls: router, router, []), FaultConfig())
    causes = [life.failure() for _ in range(2)]
    assert causes[-1] == "it cannot be watched: FileNotFoundError('router.log')"


@pytest.mark.parametrize("limits_memory", [True, False])
def test_a_router_that_takes_too_much_memory_has_failed(monkeypatch: pytest.MonkeyPatch, limits_memory: bool) -> None:
    monkeypatch.setattr(lives, "_SLICE_S", 0.01)
    ended = threading.Event()

    class Router:
        size = 3 << 20

        def until_failure(self, **limits: Any) -> str:
            ended.wait(60)
            return "its process ended"

        def memory_bytes(self) -> int:
            return self.size

    router: Any = Router()
    fault = FaultConfig(rollout_router_memory_limit_bytes=4 << 20)
    life = RouterLife(Front(lambda urls: router, router, []), fault, limits_memory=limits_memory)
    assert life.failure() is None
    router.size = 5 << 20
    cause = life.failure()
    ended.set()
    assert cause == ("it takes 0.00 GiB (--rollout-router-memory-limit-bytes 4194304)" if limits_memory else None)


def test_only_engines_of_the_run_are_waited_for_when_they_serve_no_longer() -> None:
    """Nobody would find out and start again another's."""
    fault = FaultConfig(rollout_health_check_timeout=30.0, rollout_health_check_interval=5.0)
    for kind, notice_s in ((EngineFleet, 70.0), (ExternalFleet, 0.0)):
        fleet = object.__new__(kind)
        fleet._config = Config(fault=fault)
        assert fleet._notice_s == notice_s


def test_a_router_that_begins_to_start_when_the_run_ends_does_not_stay() -> None:
    calls: list[str] = []

    class Router:
        def start(self) -> None:
            front.close()  # from another thread, in the moment before there is a process
            calls.append("start")

        def stop(self) -> None:
            calls.append("stop")

    router: Any = Router()
    front = Front(lambda urls: router, router, ["http://engine"])
    front.restart()
    assert calls == ["stop", "start", "stop"]


def test_a_restart_on_a_node_that_is_gone_before_ray_knows_it_ends_and_the_router_is_started_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No worker is ever placed there, and none of its connections is closed."""
    monkeypatch.setattr(ray, "wait", lambda calls, timeout: ([], calls))
    there = itertools.chain((True, True), itertools.repeat(False))
    router: Any = object()
    front = Front(lambda urls: router, router, [])
    told: list[str] = []
    front.on_trouble = told.append
    call = SimpleNamespace(remote=lambda **how: "never")
    life = EngineLife(
        3,
        workers=[None] * 4,
        make_worker=lambda: SimpleNamespace(start=call),
        start_with={},
        engine=router,
        front=front,
        node_is_there=lambda: next(there),
        give_weights=lambda: None,
        fault=FaultConfig(),
        start_timeout_s=1.0,
    )
    with pytest.raises(NodeLeft):
        life.start()
    (cause,) = told
    assert "engine 3, whose node has left" in cause
