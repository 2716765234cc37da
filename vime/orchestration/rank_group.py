"""Ranks that train together, each a Ray actor: how they start, meet, are asked all at once, and end."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from vime.config import Config
from vime.errors import ConfigError, TrainingError, VimeError
from vime.observability.trace import Span
from vime.orchestration.cluster import Reservation
from vime.orchestration.placement import Layout, Placement
from vime.platform import get_platform
from vime.platform.base import Platform

_log = logging.getLogger(__name__)

_DEATH_S = 10.0  # Ray hears of a whole node's end some seconds after its connections have broken
_CLOSE_TIMEOUT_S = 60.0  # a rank that was interrupted inside a collective never answers
# Two actors may sit on one device when trainer and engines take turns; each claims less than half of it.
_SHARE = 0.4


class RankWorker:
    """One rank of a group. Created by a `RankGroup`; every method is collective over the group's ranks.

    Args:
        host: the address at which the other ranks reach this one.
        ranks_on_node: ranks that train on this node, of whichever group.
    """

    def __init__(
        self,
        config: Config,
        *,
        platform_name: str,
        hf_path: str,
        rank: int,
        world_size: int,
        total_steps: int,
        host: str,
        ranks_on_node: int,
    ) -> None:
        self._platform = get_platform(platform_name)
        # Thread counts and interfaces: must be set before torch is imported.
        os.environ.update(self._platform.trainer_environment(ranks_on_node, host))
        self._config, self._hf_path, self._host = config, hf_path, host
        self._rank, self._world_size, self._total_steps = rank, world_size, total_steps
        self._trainer: Any = None
        self._store: Any = None

    def open_store(self) -> int:
        """Serve the store at which ranks on several nodes meet, on this node's address. Returns: its port."""
        from vime.weight_sync.broadcast import bound_store

        self._store, port = bound_store(self._host, self._timeout)
        return port

    def preload(self) -> None:
        """Import what `setup` needs, which takes long; touches no device."""
        self._imported()

    def setup(self, meeting: str | tuple[str, int]) -> None:
        """Join the other ranks and build the model. Called once, on all ranks at the same time.

        Args: meeting: on one node a file's path, which nobody else can reach; on several the store's host and port.
        """
        require_folder(self._hf_path)
        trainer = self._imported()
        self._trainer = trainer(
            self._config,
            hf_path=self._hf_path,
            platform=self._platform,
            rank=self._rank,
            world_size=self._world_size,
            init_method=self._init_method(meeting),
            total_steps=self._total_steps,
            **self._own_arguments(),
        )

    def _imported(self) -> Callable[..., Any]:
        from vime.trainer.megatron.patches.lean_import import lean_import

        with lean_import():
            return self._trainer_class()

    def _trainer_class(self) -> Callable[..., Any]:
        """What each rank builds; imports it."""
        raise NotImplementedError

    def _own_arguments(self) -> dict[str, Any]:
        """Arguments of that class that no other has."""
        return {}

    def _init_method(self, meeting: str | tuple[str, int]) -> Any:
        return f"file://{meeting}" if isinstance(meeting, str) else self._join_store(*meeting)

    def _join_store(self, host: str, port: int) -> Any:
        if self._store is None:
            from vime.weight_sync.broadcast import joined_store

            self._store = joined_store(host, port, self._timeout)
        return self._store

    @property
    def _timeout(self) -> timedelta:
        return timedelta(minutes=self._config.train.distributed_timeout_minutes)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of what was built."""
        return getattr(self._trainer, method)(*args)


def wait_all(calls: Mapping[Any, str], *, died: type[VimeError] = TrainingError) -> list[Any]:
    """The results of Ray calls, in order; the first that fails raises, while others may still run.

    An actor that dies takes the collectives of the others with it, whose errors may come first: before an error that
    is none of vime's is raised, a death is waited for a little.

    Args:
        calls: object reference -> who was asked, in words for the error.
        died: what to raise if the actor's process is gone.
    Raises: `died`; the error itself, as raised there, if it is one of vime's; TrainingError with its traceback if not.
    """
    pending = list(calls)
    while pending:
        done, pending = ray.wait(pending, num_returns=1)
        try:
            ray.get(done)
        except RayActorError as error:
            raise died(f"{calls[done[0]]}: its process died ({error})") from error
        except RayTaskError as error:
            if isinstance(error.cause, VimeError):
                raise error.cause from error
            if (death := _death_among(pending)) is not None:
                raise died(f"{calls[death[0]]}: its process died ({death[1]})") from error
            raise TrainingError(f"{calls[done[0]]} failed: {error}") from error
    return list(ray.get(list(calls)))


def _death_among(pending: list[Any]) -> tuple[Any, RayActorError] | None:
    """The first of these calls whose actor turns out to be gone; None if none does soon."""
    end = time.monotonic() + _DEATH_S
    while pending and (left := end - time.monotonic()) > 0:
        done, pending = ray.wait(pending, num_returns=1, timeout=left)
        for reference in done:
            try:
                ray.get(reference)
            except RayActorError as error:
                return reference, error
            except RayTaskError:
                continue  # what failed first is told
    return None


class RankGroup:
    """Ranks behind one handle. Those that died, or wait for one, are killed at the end.

    Calls are collective, so that two threads must not make them at once: each holds `lock`, and so does whoever needs
    the weights to stay as they are over several of them.

    Args:
        worker: their class, a `RankWorker`.
        devices: one per rank.
        name: of one of them, in words for errors.
        arguments: further ones of the workers.
    """

    def __init__(
        self,
        worker: type[RankWorker],
        devices: Sequence[int],
        name: str,
        config: Config,
        placement: Placement,
        reservation: Reservation,
        platform: Platform,
        *,
        hf_path: str,
        total_steps: int,
        **arguments: Any,
    ) -> None:
        self._setups: list[Any] = []
        self._is_usable = False
        self.lock = threading.RLock()
        self._placement, self._devices, self._name = placement, tuple(devices), name
        self._meeting = tempfile.TemporaryDirectory(prefix="vime-ranks-")
        self._workers: list[Any] = [
            ray.remote(worker)
            .options(**claim(platform, placement.layout), scheduling_strategy=reservation.strategy(device))
            .remote(
                config,
                platform_name=platform.name,
                hf_path=hf_path,
                rank=rank,
                world_size=len(devices),
                total_steps=total_steps,
                host=placement.host(device),
                ranks_on_node=placement.ranks_on_node(device),
                **arguments,
            )
            for rank, device in enumerate(devices)
        ]

    def preload(self) -> None:
        """Let the ranks import what they need while something else goes on."""
        for worker in self._workers:
            worker.preload.remote()  # what fails there fails again, and is told, in `start`

    def start(self) -> None:
        """Begin to set up all ranks; `wait_ready` waits for them."""
        meeting: str | tuple[str, int] = str(Path(self._meeting.name) / "ranks")
        if not self._placement.are_on_one_node(self._devices):
            (port,) = self._wait([self._workers[0].open_store.remote()])
            meeting = (self._placement.host(self._devices[0]), port)
        self._setups = [w.setup.remote(meeting) for w in self._workers]

    def wait_ready(self) -> None:
        """Block until every rank has its model. Raises: ConfigError for what cannot be trained."""
        self._wait(self._setups)
        self._is_usable = True

    def answers(self, method: str, *args: Any) -> list[Any]:
        """Call it on every rank, and wait for the answers, one of each."""
        with self.lock:
            return self._wait(self.ask(method, *args))

    def ask(self, method: str, *args: Any) -> list[Any]:
        """Call it on every rank, under `lock`; `wait_all` with `names` waits for the answers."""
        return [w.call.remote(method, *args) for w in self._workers]

    def names(self, references: Sequence[Any]) -> dict[Any, str]:
        """Who was asked, for each of the calls of one `ask`."""
        return {reference: f"{self._name} {rank}" for rank, reference in enumerate(references)}

    def _wait(self, references: Sequence[Any]) -> list[Any]:
        try:
            return wait_all(self.names(references))
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """A rank failed: the others may be inside a collective that never ends, so none is asked to end by itself."""
        self._is_usable = False

    def take_spans(self) -> list[list[Span]]:
        """What each rank was busy with since the last call; for the trace."""
        spans: list[list[Span]] = self.answers("take_spans")
        return spans

    def close(self) -> None:
        """End the ranks: shared memory and process groups are released where the ranks still answer.

        Hides no error that led here: a rank that fails or hangs at its end is killed like the others.
        """
        if self._is_usable:
            try:
                ray.get(self.ask("close"), timeout=_CLOSE_TIMEOUT_S)
            except RayError as error:
                _log.warning("not every %s ended by itself: %s", self._name, error)
        for worker in self._workers:
            ray.kill(worker)
        self._meeting.cleanup()


def claim(platform: Platform, layout: Layout) -> dict[str, float]:
    """What one actor takes of its device's bundle."""
    share = _SHARE if layout.shared or platform.ray_resource == "CPU" else 1.0
    return {"num_cpus": share} if platform.ray_resource == "CPU" else {"num_gpus": share, "num_cpus": share}


def require_folder(path: str) -> None:
    """Raises: ConfigError if this node does not have the checkpoint."""
    if not Path(path).is_dir():
        raise ConfigError(
            f"--hf-checkpoint: {path} is not on this node ({socket.gethostname()}); every node needs it at the same "
            "path, on a shared file system or as a copy"
        )
