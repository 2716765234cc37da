"""What becomes of the router when it cannot be watched, and of one that starts while the run ends."""

from __future__ import annotations

from typing import Any

from vime.config import FaultConfig
from vime.orchestration.lives import Front, RouterLife


def test_a_router_that_cannot_be_watched_has_failed() -> None:
    class Router:
        def until_failure(self, **limits: Any) -> str:
            raise FileNotFoundError("router.log")

    router: Any = Router()
    life = RouterLife(Front(lambda urls: router, router, []), FaultConfig())
    causes = [life.failure() for _ in range(2)]
    assert causes[-1] == "it cannot be watched: FileNotFoundError('router.log')"


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
