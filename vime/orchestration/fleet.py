"""What the engines of a run have in common, whoever started them: a client for each, and the router in front."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vime.config import Config
from vime.engine.vllm.client import RouterClient, VllmEngine
from vime.engine.vllm.router import RouterProcess
from vime.errors import EngineDead, EngineError
from vime.observability.engine_stats import EngineStats
from vime.orchestration import sizes
from vime.orchestration.engine_settings import routing_shape, support_limit

_log = logging.getLogger(__name__)


class Fleet(ABC):
    """All engines of a run. Order of calls: construct, `wait_ready`, use, `close`.

    Args:
        key: the run's key, demanded on every path of engines and router.
        log_dir: one log file per process goes there.
        hf_config: config.json of the run's checkpoint.
    """

    def __init__(self, config: Config, *, key: str, log_dir: Path, hf_config: Mapping[str, Any]) -> None:
        self._config, self._key, self._log_dir = config, key, log_dir
        self._routing, self._support_limit = routing_shape(config, hf_config), support_limit(config, hf_config)
        self._router: RouterProcess | None = None
        self.engines: list[VllmEngine] = []

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
        """What each engine has done so far; None, with a warning, if one does not say: metrics end no run."""
        try:
            with ThreadPoolExecutor(max(1, len(self.engines))) as pool:
                return list(pool.map(VllmEngine.stats, self.engines))
        except EngineError as error:
            _log.warning("no figures of the engines for this rollout: %s", error)
            return None

    def check_alive(self) -> None:
        """Raises: EngineDead naming the engines that are gone, or the router."""
        if (dead := self.dead_engines()) is not None:
            raise EngineDead(dead)
        if self._router is not None and not self._router.is_alive():
            raise EngineDead(f"the router is gone; its last words are in {self._log_dir / 'router.log'}")

    def close(self) -> None:
        """End what was started here. Safe to call at any point, more than once; hides no error that led here."""
        if self._router is not None:
            self._router.stop()
        for engine in self.engines:
            engine.close()

    def _engine_at(self, url: str) -> VllmEngine:
        return VllmEngine(url, self._key, weight_timeout_s=sizes.weight_call_timeout_s(self._config))

    def _serve(self) -> RouterClient:
        """A router in front of the engines, which serve already, and the client for it."""
        urls = [engine.url for engine in self.engines]
        log_path = self._log_dir / "router.log"
        self._router = RouterProcess(urls, key=self._key, settings=self._config.router, log_path=log_path)
        self._router.start()
        self._router.wait_ready()
        connections = self._config.rollout.rollout_concurrency
        return RouterClient(
            self._router.url,
            urls,
            self._key,
            max_connections=connections,
            routing=self._routing,
            support_limit=self._support_limit,
        )
