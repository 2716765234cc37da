"""Ray actors, and the handles that satisfy the protocols: a loop never knows which it holds."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from vime.config import Config, FaultConfig
from vime.errors import ConfigError, TrainingError, VimeError
from vime.observability.trace import Span
from vime.orchestration.cluster import Reservation
from vime.orchestration.placement import Layout, Placement
from vime.platform import get_platform
from vime.platform.base import Platform
from vime.protocols import TRAINER_PARTS, DeviceUse, TrainerPart
from vime.types import Metrics, PolicyVersion, TrainBatch
from vime.weight_sync import Route
from vime.wire import BucketMessage

_log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 60.0  # a rank that was interrupted inside a collective never answers
# Two actors may sit on one device when trainer and engines take turns; each claims less than half of it.
_SHARE = 0.4


class TrainerWorker:
    """One training rank. Created by `TrainerGroup`; every method is collective over the ranks.

    Args:
        host: the address at which the other ranks reach this one.
        ranks_on_node: training ranks on this node.
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
        route: Route | None,
        host: str,
        ranks_on_node: int,
    ) -> None:
        self._platform = get_platform(platform_name)
        # Thread counts and interfaces: must be set before torch is imported.
        os.environ.update(self._platform.trainer_environment(ranks_on_node, host))
        self._config, self._hf_path, self._route, self._host = config, hf_path, route, host
        self._rank, self._world_size, self._total_steps = rank, world_size, total_steps
        self._trainer: Any = None
        self._store: Any = None
        self._buckets: Iterator[BucketMessage | None] | None = None

    def open_store(self) -> int:
        """Serve the store at which ranks on several nodes meet, on this node's address. Returns: its port."""
        from vime.weight_sync.broadcast import bound_store

        self._store, port = bound_store(self._host, self._timeout)
        return port

    def preload(self) -> None:
        """Import what `setup` needs, which takes long; touches no device."""
        from vime.trainer.megatron.known_warnings import silence

        silence()
        import vime.trainer.megatron.trainer  # noqa: F401

    def setup(self, meeting: str | tuple[str, int]) -> None:
        """Join the other ranks and build the model. Called once, on all ranks at the same time.

        Args: meeting: on one node a file's path, which nobody else can reach; on several the store's host and port.
        """
        require_folder(self._hf_path)
        from vime.trainer.megatron.known_warnings import silence

        silence()
        from vime.trainer.megatron.trainer import MegatronTrainer
        from vime.weight_sync import COLLECTIVE, make_writer

        writer = None
        if self._route is not None and (self._rank == 0 or self._route.transport in COLLECTIVE):
            writer = make_writer(self._route, self._config)
        self._trainer = MegatronTrainer(
            self._config,
            hf_path=self._hf_path,
            platform=self._platform,
            rank=self._rank,
            world_size=self._world_size,
            init_method=f"file://{meeting}" if isinstance(meeting, str) else self._join_store(*meeting),
            total_steps=self._total_steps,
            writer=writer,
        )

    def _join_store(self, host: str, port: int) -> Any:
        if self._store is None:
            from vime.weight_sync.broadcast import joined_store

            self._store = joined_store(host, port, self._timeout)
        return self._store

    @property
    def _timeout(self) -> timedelta:
        return timedelta(minutes=self._config.train.distributed_timeout_minutes)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the trainer."""
        return getattr(self._trainer, method)(*args)

    def begin_weights(self, version: PolicyVersion) -> None:
        """Start a pass over the weights; `next_bucket` follows until it gives None."""
        self._buckets = self._trainer.weights(version)

    def next_bucket(self) -> tuple[bool, BucketMessage | None]:
        """(there was one, its message on rank 0). The bytes of the one before the previous are overwritten."""
        assert self._buckets is not None, "begin_weights was not called"
        for message in self._buckets:
            return True, message
        self._buckets = None
        return False, None

    def call_off_weights(self) -> None:
        """End a pass over the weights early, because an engine failed."""
        self._buckets = None
        self._trainer.call_off_weights()


def wait_all(calls: Mapping[Any, str], *, died: type[VimeError] = TrainingError) -> list[Any]:
    """The results of Ray calls, in order; the first that fails raises at once, while others may still run.

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
            raise TrainingError(f"{calls[done[0]]} failed: {error}") from error
    return list(ray.get(list(calls)))


class TrainerGroup:
    """All training ranks behind one handle that satisfies `Trainer`. Ranks that died, or wait for one, are killed.

    Calls are collective, so that two threads must not make them at once: each holds `lock`, and so does whoever needs
    the weights to stay as they are over several of them.
    """

    def __init__(
        self,
        config: Config,
        placement: Placement,
        reservation: Reservation,
        platform: Platform,
        *,
        hf_path: str,
        total_steps: int,
        route: Route | None,
    ) -> None:
        self._setups: list[Any] = []
        self._is_usable = False
        self.lock = threading.RLock()
        self.last_trained: int | None = None
        """The last rollout that the weights were trained on in this run; written under `lock`."""
        self._placement = placement
        self._meeting = tempfile.TemporaryDirectory(prefix="vime-ranks-")
        devices = placement.layout.trainer_devices
        self._workers: list[Any] = [
            ray.remote(TrainerWorker)
            .options(**_claim(platform, placement.layout), scheduling_strategy=reservation.strategy(device))
            .remote(
                config,
                platform_name=platform.name,
                hf_path=hf_path,
                rank=rank,
                world_size=len(devices),
                total_steps=total_steps,
                route=route,
                host=placement.host(device),
                ranks_on_node=placement.ranks_on_node(rank),
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
        if not self._placement.trainer_is_on_one_node:
            (port,) = self._wait([self._workers[0].open_store.remote()])
            meeting = (self._placement.host(self._placement.layout.trainer_devices[0]), port)
        self._setups = [w.setup.remote(meeting) for w in self._workers]

    def wait_ready(self) -> None:
        """Block until every rank has its model. Raises: ConfigError for what cannot be trained."""
        self._wait(self._setups)
        self._is_usable = True

    def _all(self, method: str, *args: Any) -> list[Any]:
        with self.lock:
            return self._wait([w.call.remote(method, *args) for w in self._workers])

    def _wait(self, references: Sequence[Any]) -> list[Any]:
        try:
            return wait_all({reference: f"training rank {rank}" for rank, reference in enumerate(references)})
        except BaseException:
            # The others may be inside a collective that never ends.
            self._is_usable = False
            raise

    def log_probs(self, batch: TrainBatch) -> npt.NDArray[np.float32]:
        """See `Trainer`."""
        result: npt.NDArray[np.float32] = self._all("log_probs", ray.put(batch))[0]
        return result

    def score(self, sequences: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """See `Trainer`."""
        result: list[npt.NDArray[np.float32]] = self._all("score", sequences)[0]
        return result

    def values(self, batch: TrainBatch) -> npt.NDArray[np.float32]:
        """See `Trainer`."""
        result: npt.NDArray[np.float32] = self._all("values", ray.put(batch))[0]
        return result

    def train(self, batch: TrainBatch) -> Metrics:
        """See `Trainer`."""
        with self.lock:
            metrics: Metrics = self._all("train", ray.put(batch))[0]
            self.last_trained = batch.rollout_id
        return metrics

    def weights(self, version: PolicyVersion) -> Iterator[BucketMessage]:
        """See `Trainer`."""
        self._wait([w.begin_weights.remote(version) for w in self._workers])
        while True:
            # All ranks: with ipc, each of them must hold the bucket before any engine reads it.
            there, message = self._wait([w.next_bucket.remote() for w in self._workers])[0]
            if not there:
                return
            yield message

    def call_off_weights(self) -> None:
        """See `Trainer`."""
        self._wait([w.call_off_weights.remote() for w in self._workers])

    def weight_names(self) -> list[str]:
        """See `Trainer`."""
        names: list[str] = self._all("weight_names")[0]
        return names

    def save(self, path: Path) -> None:
        """See `Trainer`."""
        self._all("save", path)

    def begin_save(self, path: Path) -> None:
        """See `Trainer`."""
        self._all("begin_save", path)

    def end_save(self, wait: bool) -> bool:
        """See `Trainer`."""
        done: bool = self._all("end_save", wait)[0]
        return done

    def load(self, path: Path) -> None:
        """See `Trainer`."""
        self._all("load", path)

    def export_hf(self, path: Path) -> None:
        """See `Trainer`."""
        self._all("export_hf", path)

    def offload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """See `Trainer`."""
        self._all("offload", parts)

    def onload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """See `Trainer`."""
        self._all("onload", parts)

    def device_memory(self) -> DeviceUse | None:
        """See `Trainer`."""
        figures: list[DeviceUse | None] = self._all("device_memory")
        return max((f for f in figures if f is not None), key=lambda figure: figure.used, default=None)

    def take_spans(self) -> list[list[Span]]:
        """What each rank was busy with since the last call; for the trace."""
        spans: list[list[Span]] = self._all("take_spans")
        return spans

    def close(self) -> None:
        """End the ranks: shared memory and process groups are released where the ranks still answer.

        Hides no error that led here: a rank that fails or hangs at its end is killed like the others.
        """
        if self._is_usable:
            try:
                ray.get([w.call.remote("close") for w in self._workers], timeout=_CLOSE_TIMEOUT_S)
            except RayError as error:
                _log.warning("not every training rank ended by itself: %s", error)
        for worker in self._workers:
            ray.kill(worker)
        self._meeting.cleanup()


class EngineWorker:
    """Owns one vLLM server process. Control and generation go to the server by HTTP, not through this actor."""

    def __init__(self) -> None:
        self._server: Any = None

    def start(self, **kwargs: Any) -> None:
        """Start the server process; returns before it is ready."""
        from vime.engine.vllm.server import EngineServer

        require_folder(kwargs["model"])
        self._server = EngineServer(**kwargs)
        self._server.start()

    def wait_ready(self, timeout_s: float) -> str:
        """Block until the server answers; returns its URL. Raises: EngineDead with the end of its log."""
        self._server.wait_ready(timeout_s)
        url: str = self._server.url
        return url

    def is_alive(self) -> bool:
        """Whether the server process runs."""
        return bool(self._server.is_alive())

    def until_failure(self, fault: FaultConfig) -> str:
        """Block until the server, which was ready, does not serve any more. Returns: why, in words."""
        words: str = self._server.until_failure(
            interval_s=fault.rollout_health_check_interval,
            timeout_s=fault.rollout_health_check_timeout,
            first_wait_s=fault.rollout_health_check_first_wait,
        )
        return words

    def stop(self, grace_s: float = 15.0) -> None:
        """End the server process."""
        if self._server is not None:
            self._server.stop(grace_s)


def start_engine_worker(number: int, placement: Placement, reservation: Reservation, platform: Platform) -> Any:
    """The `EngineWorker` of an engine of the layout, on its first device; the run's reservation holds the others."""
    return (
        ray.remote(EngineWorker)
        .options(
            **_claim(platform, placement.layout),
            max_concurrency=4,  # `stop` must not queue behind a `wait_ready` of minutes, or `until_failure`
            scheduling_strategy=reservation.strategy(placement.layout.engine_devices[number][0]),
        )
        .remote()
    )


def _claim(platform: Platform, layout: Layout) -> dict[str, float]:
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
