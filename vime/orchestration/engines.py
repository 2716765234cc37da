"""Engines that a run starts: one Ray actor per vLLM server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
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
from vime.orchestration.front import Front
from vime.orchestration.keeper import Keeper, keep_engine_state
from vime.orchestration.lives import EngineLife, alive_nodes
from vime.orchestration.placement import Placement
from vime.orchestration.rank_group import wait_all
from vime.orchestration.restarts import RestartBudget, RestartPolicy
from vime.orchestration.roster import Roster
from vime.orchestration.workers import start_engine_worker
from vime.platform.base import Platform

_log = logging.getLogger(__name__)

_OUT_OF_MEMORY = ("out of memory", "allocate memory", "memoryerror")  # as CUDA's driver, torch, Linux and Python say it
_ANSWER_S = 60.0  # of an engine's worker, which only looks at or ends a process


class EngineFleet(Fleet):
    """Engines that the run starts itself, when this is constructed.

    Args:
        hf_path: the checkpoint folder the engines start from.
        hf_config: its config.json.
        key, log_dir: see `Fleet`.
        sharing: engine arguments that follow from sharing devices with the trainer.
    """

    _restarts_engines = True

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
        self._placement = placement
        self._make_worker = partial(
            start_engine_worker, placement=placement, reservation=reservation, platform=platform
        )
        self._workers = [self._make_worker(number) for number in range(len(placement.layout.engine_devices))]
        arguments = engine_arguments(config, platform, hf_config, sharing)
        routed_experts = self._routing is not None
        numbers = [[reservation.numbers[device] for device in devices] for devices in placement.layout.engine_devices]
        self._start_with = [
            dict(
                model=hf_path,
                arguments=arguments,
                environment=engine_environment(
                    platform, numbers[i], routed_experts=routed_experts, aligned=config.train.aligned
                ),
                key=key,
                log_path=log_dir / f"engine_{i}.log",
                host=placement.host(devices[0]),
                routed_experts=routed_experts,
            )
            for i, devices in enumerate(placement.layout.engine_devices)
        ]
        self._starts = [w.start.remote(**how) for w, how in zip(self._workers, self._start_with, strict=True)]

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

    def _engine_keepers(
        self,
        roster: Roster,
        policy: RestartPolicy,
        front: Front,
        give_weights: Callable[[int], None],
        place: Callable[[], AbstractContextManager[object]],
    ) -> list[Keeper]:
        keepers = []
        for number, engine in enumerate(self.engines):
            node = self._placement.nodes[self._placement.layout.engine_devices[number][0]].node_id
            life = EngineLife(
                number,
                workers=self._workers,
                make_worker=partial(self._make_worker, number),
                start_with=self._start_with[number],
                engine=engine,
                front=front,
                node_is_there=lambda node=node: node in alive_nodes(),  # type: ignore[misc]
                give_weights=partial(give_weights, number),
                fault=self._config.fault,
                start_timeout_s=self._config.log.engine_start_timeout_s,
            )
            keeper = Keeper(
                f"engine {number}",
                life,
                RestartBudget(policy),
                on_state=keep_engine_state(roster, number),
                on_end=roster.fail,
                place=place,
            )
            keepers.append(keeper)
        return keepers

    def _is_sick(self, number: int, error: BaseException) -> bool:
        """It is dead, has run out of memory, or says that it is not well; other errors are not of its making."""
        said = str(error).lower()
        is_said = isinstance(error, EngineDead) or any(words in said for words in _OUT_OF_MEMORY)
        return is_said or not self.engines[number].health()

    def dead_engines(self) -> str | None:
        """Those whose process is gone, with their logs."""
        calls = [worker and worker.is_alive.remote() for worker in self._workers]
        alive = [call is not None and _answers_alive(call) for call in calls]
        dead = [i for i, up in enumerate(alive) if not up]
        logs = ", ".join(str(self._log_dir / f"engine_{i}.log") for i in dead)
        return f"engine {dead} of {len(alive)} is gone; its last words are in {logs}" if dead else None

    def close(self) -> None:
        """End router and engines. Safe to call at any point, more than once; hides no error that led here."""
        super().close()
        for number, stopped in [(i, w.stop.remote()) for i, w in enumerate(self._workers) if w is not None]:
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
