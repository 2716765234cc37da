"""What the engines of a run have in common, whoever started them: a client for each, and the router in front."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from vime.config import Config
from vime.engine.vllm.client import RouterClient
from vime.engine.vllm.control import VllmEngine
from vime.engine.vllm.router import RouterProcess
from vime.errors import EngineDead, EngineError
from vime.observability.engine_stats import EngineStats
from vime.observability.trace import Span
from vime.orchestration import sizes
from vime.orchestration.engine_settings import routing_shape, support_limit
from vime.orchestration.front import Front
from vime.orchestration.keeper import Keeper, keep_router_state
from vime.orchestration.lives import RouterLife
from vime.orchestration.restarts import RestartBudget, RestartPolicy
from vime.orchestration.roster import Roster

_log = logging.getLogger(__name__)


class Fleet(ABC):
    """All engines of a run. Order of calls: construct, `wait_ready`, perhaps `keep_going`, use, `close`.

    Args:
        key: the run's key, demanded on every path of engines and router.
        log_dir: one log file per process goes there.
        hf_config: config.json of the run's checkpoint.
    """

    _restarts_engines = False
    """What an engine fails with is found out, and it is started again; else somebody else has to."""

    def __init__(self, config: Config, *, key: str, log_dir: Path, hf_config: Mapping[str, Any]) -> None:
        self._config, self._key, self._log_dir = config, key, log_dir
        self._routing, self._support_limit = routing_shape(config, hf_config), support_limit(config, hf_config)
        self._front: Front | None = None
        self._keepers: list[Keeper] = []
        self.engines: list[VllmEngine] = []
        self.roster: Roster | None = None
        """Which engines are there, once they are kept going; None where what fails ends the run."""

    @property
    @abstractmethod
    def num_devices(self) -> int:
        """Devices of all engines."""

    @abstractmethod
    def wait_ready(self, timeout_s: float) -> RouterClient:
        """Block until every engine answers, start the router, and give the client that rollouts use.

        Raises: EngineDead with the end of the log of what died.
        """

    @abstractmethod
    def dead_engines(self) -> str | None:
        """Which engines are gone and where they say why; None while all are there."""

    def stats(self) -> list[EngineStats] | None:
        """What each engine has done so far, nothing for one that was given up; None, with a warning, if another does
        not say: metrics end no run."""
        lost = self.roster.given_up() if self.roster is not None else []

        def read(number: int) -> EngineStats:
            return EngineStats() if number in lost else self.engines[number].stats()

        try:
            with ThreadPoolExecutor(max(1, len(self.engines))) as pool:
                return list(pool.map(read, range(len(self.engines))))
        except EngineError as error:
            _log.warning("no figures of the engines for this rollout: %s", error)
            return None

    def keep_going(
        self,
        client: RouterClient,
        give_weights: Callable[[int], None],
        place: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> Roster | None:
        """Watch engines and router from now on, and start again what fails; the way to the engines is the client's.

        Args:
            give_weights: brings the trainer's weights to the engine of this number, verified.
            place: entered for the time of an engine's restart.
        Returns: which engines are there; None with --no-use-fault-tolerance.
        """
        fault = self._config.fault
        if not fault.use_fault_tolerance or self._front is None:
            return None
        roster = self.roster = Roster(
            len(self.engines),
            self._is_sick,
            lambda number, cause: self._keepers[number].condemn(cause),
            lambda number: self._keepers[number].wait_ended(),
            notice_s=self._notice_s,
        )
        policy = RestartPolicy.of(fault)
        router = Keeper(
            "the router",
            # Requests of a fixed batch are not sent again, so that a restart of the router would end such a run.
            RouterLife(self._front, fault, limits_memory=not self._config.rollout.deterministic),
            RestartBudget(policy),
            on_state=keep_router_state(roster),
            on_end=roster.fail,
        )
        self._front.on_trouble = router.condemn
        self._keepers = [*self._engine_keepers(roster, policy, self._front, give_weights, place), router]
        client.outages = roster
        self._front.client = client
        for keeper in self._keepers:
            keeper.start()
        return roster

    @property
    def _notice_s(self) -> float:
        """Within which an engine that serves no longer is found out."""
        fault = self._config.fault
        # Twice, for the questions that are asked meanwhile.
        looks = 2 * (fault.rollout_health_check_timeout + fault.rollout_health_check_interval)
        return looks if self._restarts_engines else 0.0

    def _engine_keepers(
        self,
        roster: Roster,
        policy: RestartPolicy,
        front: Front,
        give_weights: Callable[[int], None],
        place: Callable[[], AbstractContextManager[object]],
    ) -> list[Keeper]:
        """One for each engine; none where somebody else started them."""
        return []

    def _is_sick(self, number: int, error: BaseException) -> bool:
        """Whether an engine that failed in a call is to be restarted."""
        return False

    def take_spans(self) -> list[list[Span]]:
        """The restarts of each engine since the last call, and on the first one's track the router's; for the trace."""
        if not self._keepers:
            return []
        *engines, router = [keeper.spans.take() for keeper in self._keepers]
        spans = engines or [[] for _ in self.engines]
        spans[0] += [{**span, "name": "router restart"} for span in router]
        return spans

    def check_alive(self) -> None:
        """Raises: EngineDead naming the engines that are gone, or the router; what ended their restarts."""
        if self.roster is not None:
            self.roster.check()
            return  # what is gone right now comes back
        if (dead := self.dead_engines()) is not None:
            raise EngineDead(dead)
        if self._front is not None and not self._front.router.is_alive():
            raise EngineDead(f"the router is gone; its last words are in {self._log_dir / 'router.log'}")

    def close(self) -> None:
        """End what was started here. Safe to call at any point, more than once; hides no error that led here."""
        for keeper in self._keepers:
            keeper.dismiss()
        for keeper in self._keepers:
            keeper.close()
        if self._front is not None:
            self._front.close()
        for engine in self.engines:
            engine.close()

    def _engine_at(self, url: str) -> VllmEngine:
        return VllmEngine(url, self._key, weight_timeout_s=sizes.weight_call_timeout_s(self._config))

    def _serve(self) -> RouterClient:
        """A router in front of the engines, which serve already, and the client for it."""
        urls = [engine.url for engine in self.engines]
        router = self._make_router(urls)
        self._front = Front(self._make_router, router, urls)
        router.start()
        router.wait_ready()
        connections = self._config.rollout.rollout_concurrency
        return RouterClient(
            router.url,
            urls,
            self._key,
            max_connections=connections,
            routing=self._routing,
            support_limit=self._support_limit,
        )

    def _make_router(self, urls: Sequence[str]) -> RouterProcess:
        log_path = self._log_dir / "router.log"
        return RouterProcess(urls, key=self._key, settings=self._config.router, log_path=log_path)
