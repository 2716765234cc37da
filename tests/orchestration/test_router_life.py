"""What becomes of the router when it cannot be watched."""

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
