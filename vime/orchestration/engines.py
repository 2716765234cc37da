"""The inference side of a run: one Ray actor per vLLM server, the router in front, and clients for both."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from vime.config import Config
from vime.engine.vllm.client import RouterClient, VllmEngine
from vime.engine.vllm.router import RouterProcess
from vime.errors import EngineDead, EngineError
from vime.observability.engine_stats import EngineStats
from vime.orchestration.cluster import Reservation
from vime.orchestration.engine_settings import engine_arguments
from vime.orchestration.placement import Placement
from vime.orchestration.workers import start_engine_workers, wait_all
from vime.platform.base import Platform

_log = logging.getLogger(__name__)


class EngineFleet:
    """All engines of a run. Order of calls: construct (starts processes), `wait_ready`, use, `close`.

    Args:
        hf_path: the checkpoint folder the engines start from.
        hf_config: its config.json.
        key: the run's key, demanded on every path of engines and router.
        log_dir: one log file per process goes there.
    """

    def __init__(
        self,
        config: Config,
        placement: Placement,
        reservation: Reservation,
        platform: Platform,
        *,
        hf_path: str,
        hf_config: Mapping[str, Any],
        key: str,
        log_dir: Path,
    ) -> None:
        self._config, self._key, self._log_dir = config, key, log_dir
        self._num_devices = sum(map(len, placement.layout.engine_devices))
        self._workers = start_engine_workers(placement, reservation, platform)
        arguments = engine_arguments(config, platform, hf_config)
        self._starts = [
            w.start.remote(
                model=hf_path,
                arguments=arguments,
                environment=platform.engine_environment(),
                key=key,
                log_path=log_dir / f"engine_{i}.log",
                host=placement.host(placement.layout.engine_devices[i][0]),
            )
            for i, w in enumerate(self._workers)
        ]
        self._router: RouterProcess | None = None
        self.engines: list[VllmEngine] = []

    def wait_ready(self, timeout_s: float) -> RouterClient:
        """Block until every engine answers, start the router, and give the client that rollouts use.

        Raises: EngineDead with the end of the engine's log.
        """
        wait_all({start: f"engine {i}" for i, start in enumerate(self._starts)}, died=EngineDead)
        waits = {w.wait_ready.remote(timeout_s): f"engine {i}" for i, w in enumerate(self._workers)}
        urls: list[str] = wait_all(waits, died=EngineDead)
        self.engines = [VllmEngine(url, self._key) for url in urls]
        self._router = start_router(urls, self._key, self._config, self._log_dir)
        connections = self._config.rollout.rollout_concurrency
        return RouterClient(self._router.url, urls, self._key, max_connections=connections)

    @property
    def num_devices(self) -> int:
        """Devices of all engines."""
        return self._num_devices

    def stats(self) -> list[EngineStats] | None:
        """See `read_stats`."""
        return read_stats(self.engines)

    def check_alive(self) -> None:
        """Raises: EngineDead naming the engines whose process is gone, or the router."""
        alive = [_answers_alive(call) for call in [w.is_alive.remote() for w in self._workers]]
        if dead := [i for i, up in enumerate(alive) if not up]:
            logs = ", ".join(str(self._log_dir / f"engine_{i}.log") for i in dead)
            raise EngineDead(f"engine {dead} of {len(alive)} is gone; its last words are in {logs}")
        if self._router is not None and not self._router.is_alive():
            raise EngineDead(f"the router is gone; its last words are in {self._log_dir / 'router.log'}")

    def close(self) -> None:
        """End router and engines. Safe to call at any point, more than once; hides no error that led here."""
        if self._router is not None:
            self._router.stop()
        for engine in self.engines:
            engine.close()
        for number, stopped in enumerate([w.stop.remote() for w in self._workers]):
            try:
                ray.get(stopped, timeout=60)
            except RayError as error:
                # A server whose owner is gone ends by itself, and Ray's shutdown ends the owner.
                _log.warning("engine %d could not be asked to stop: %s", number, error)


def read_stats(engines: Sequence[VllmEngine]) -> list[EngineStats] | None:
    """What each engine has done so far; None, with a warning, if one does not say: metrics end no run."""
    try:
        with ThreadPoolExecutor(max(1, len(engines))) as pool:
            return list(pool.map(VllmEngine.stats, engines))
    except EngineError as error:
        _log.warning("no figures of the engines for this rollout: %s", error)
        return None


def start_router(urls: Sequence[str], key: str, config: Config, log_dir: Path) -> RouterProcess:
    """A router in front of engines that serve, ready."""
    router = RouterProcess(urls, key=key, settings=config.router, log_path=log_dir / "router.log")
    router.start()
    try:
        router.wait_ready()
    except BaseException:
        router.stop()
        raise
    return router


def _answers_alive(call: Any) -> bool:
    """The answer of `EngineWorker.is_alive`; no when the worker itself is gone, and its server with it."""
    try:
        return bool(ray.get(call))
    except RayActorError:
        return False
