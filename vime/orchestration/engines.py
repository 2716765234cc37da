"""Engines that a run starts: one Ray actor per vLLM server."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from vime.config import Config
from vime.engine.vllm.client import RouterClient
from vime.errors import EngineDead
from vime.orchestration.cluster import Reservation
from vime.orchestration.engine_settings import engine_arguments, engine_environment
from vime.orchestration.fleet import Fleet
from vime.orchestration.placement import Placement
from vime.orchestration.workers import start_engine_workers, wait_all
from vime.platform.base import Platform

_log = logging.getLogger(__name__)

_ANSWER_S = 60.0  # of an engine's worker, which only looks at or ends a process


class EngineFleet(Fleet):
    """Engines that the run starts itself, when this is constructed.

    Args:
        hf_path: the checkpoint folder the engines start from.
        hf_config: its config.json.
        key, log_dir: see `Fleet`.
        sharing: engine arguments that follow from sharing devices with the trainer.
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
        sharing: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(config, key=key, log_dir=log_dir, hf_config=hf_config)
        self._num_devices = sum(map(len, placement.layout.engine_devices))
        self._workers = start_engine_workers(placement, reservation, platform)
        arguments = engine_arguments(config, platform, hf_config, sharing)
        routed_experts = self._routing is not None
        numbers = [[reservation.numbers[device] for device in devices] for devices in placement.layout.engine_devices]
        self._starts = [
            w.start.remote(
                model=hf_path,
                arguments=arguments,
                environment=engine_environment(platform, numbers[i], routed_experts=routed_experts),
                key=key,
                log_path=log_dir / f"engine_{i}.log",
                host=placement.host(devices[0]),
                routed_experts=routed_experts,
            )
            for i, (w, devices) in enumerate(zip(self._workers, placement.layout.engine_devices, strict=True))
        ]

    def wait_ready(self, timeout_s: float) -> RouterClient:
        """Block until every engine answers, start the router, and give the client that rollouts use.

        Raises: EngineDead with the end of the engine's log.
        """
        wait_all({start: f"engine {i}" for i, start in enumerate(self._starts)}, died=EngineDead)
        waits = {w.wait_ready.remote(timeout_s): f"engine {i}" for i, w in enumerate(self._workers)}
        urls: list[str] = wait_all(waits, died=EngineDead)
        self.engines = [self._engine_at(url) for url in urls]
        return self._serve()

    @property
    def num_devices(self) -> int:
        """Devices of all engines."""
        return self._num_devices

    def dead_engines(self) -> str | None:
        """Those whose process is gone, with their logs."""
        alive = [_answers_alive(call) for call in [w.is_alive.remote() for w in self._workers]]
        dead = [i for i, up in enumerate(alive) if not up]
        logs = ", ".join(str(self._log_dir / f"engine_{i}.log") for i in dead)
        return f"engine {dead} of {len(alive)} is gone; its last words are in {logs}" if dead else None

    def close(self) -> None:
        """End router and engines. Safe to call at any point, more than once; hides no error that led here."""
        super().close()
        for number, stopped in enumerate([w.stop.remote() for w in self._workers]):
            try:
                ray.get(stopped, timeout=_ANSWER_S)
            except RayError as error:
                # A server whose owner is gone ends by itself, and Ray's shutdown ends the owner.
                _log.warning("engine %d could not be asked to stop: %s", number, error)


def _answers_alive(call: Any) -> bool:
    """The answer of `EngineWorker.is_alive`; no when the worker itself is gone, and its server with it, or is mute."""
    try:
        return bool(ray.get(call, timeout=_ANSWER_S))
    except (RayActorError, GetTimeoutError):
        return False
