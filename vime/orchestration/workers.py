"""Ray actors, and the handles that satisfy the protocols: a loop never knows which it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

from vime.config import Config, FaultConfig
from vime.orchestration.cluster import Reservation
from vime.orchestration.placement import Placement
from vime.orchestration.rank_group import RankGroup, RankWorker, claim, require_folder
from vime.platform.base import Platform
from vime.protocols import TRAINER_PARTS, DeviceUse, TrainerPart
from vime.types import Metrics, PolicyVersion, TrainBatch
from vime.weight_sync import Route
from vime.wire import BucketMessage


class TrainerWorker(RankWorker):
    """One training rank of the policy. Args: route: where it sends weights; None where no engines are."""

    def __init__(self, config: Config, *, route: Route | None, **arguments: Any) -> None:
        super().__init__(config, **arguments)
        self._route = route
        self._buckets: Iterator[BucketMessage | None] | None = None

    def _trainer_class(self) -> Callable[..., Any]:
        from vime.trainer.megatron.trainer import MegatronTrainer

        return MegatronTrainer

    def _own_arguments(self) -> dict[str, Any]:
        from vime.weight_sync import COLLECTIVE, make_writer

        writer = None
        if self._route is not None and (self._rank == 0 or self._route.transport in COLLECTIVE):
            writer = make_writer(self._route, self._config)
        return {"writer": writer}

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


class TrainerGroup(RankGroup):
    """All training ranks of the policy behind one handle that satisfies `Trainer`."""

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
        super().__init__(
            TrainerWorker,
            placement.layout.trainer_devices,
            "training rank",
            config,
            placement,
            reservation,
            platform,
            hf_path=hf_path,
            total_steps=total_steps,
            route=route,
        )
        self.last_trained: int | None = None
        """The last rollout that the weights were trained on in this run; written under `lock`."""

    def log_probs(self, batch: TrainBatch) -> npt.NDArray[np.float32]:
        """See `Trainer`."""
        result: npt.NDArray[np.float32] = self.answers("log_probs", ray.put(batch))[0]
        return result

    def score(self, sequences: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """See `Trainer`."""
        result: list[npt.NDArray[np.float32]] = self.answers("score", sequences)[0]
        return result

    def values(self, batch: TrainBatch) -> npt.NDArray[np.float32]:
        """See `Trainer`."""
        result: npt.NDArray[np.float32] = self.answers("values", ray.put(batch))[0]
        return result

    def train(self, batch: TrainBatch) -> Metrics:
        """See `Trainer`."""
        with self.lock:
            metrics: Metrics = self.answers("train", ray.put(batch))[0]
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
        names: list[str] = self.answers("weight_names")[0]
        return names

    def save(self, path: Path) -> None:
        """See `Trainer`."""
        self.answers("save", path)

    def begin_save(self, path: Path) -> None:
        """See `Trainer`."""
        self.answers("begin_save", path)

    def end_save(self, wait: bool) -> bool:
        """See `Trainer`."""
        done: bool = self.answers("end_save", wait)[0]
        return done

    def load(self, path: Path) -> None:
        """See `Trainer`."""
        self.answers("load", path)

    def export_hf(self, path: Path) -> None:
        """See `Trainer`."""
        self.answers("export_hf", path)

    def offload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """See `Trainer`."""
        self.answers("offload", parts)

    def onload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """See `Trainer`."""
        self.answers("onload", parts)

    def device_memory(self) -> DeviceUse | None:
        """See `Trainer`."""
        figures: list[DeviceUse | None] = self.answers("device_memory")
        return max((f for f in figures if f is not None), key=lambda figure: figure.used, default=None)


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
            **claim(platform, placement.layout),
            max_concurrency=4,  # `stop` must not queue behind a `wait_ready` of minutes, or `until_failure`
            scheduling_strategy=reservation.strategy(placement.layout.engine_devices[number][0]),
        )
        .remote()
    )
