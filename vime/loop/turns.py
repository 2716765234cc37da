"""Trainer and engines on the same devices take turns: who leaves, who comes back, in which order.

    generation                engines awake; the trainer is away
      -> to_training          engines sleep; the trainer comes back whole
    training
      -> to_sync              the trainer keeps its weights alone; the engines' weights have their place again
    sync                      the trainer's weights go to the engines
      -> to_generation        the trainer leaves; the engines' KV cache has its place again
    generation

Each side makes room before the other takes it, so that neither ever needs more than the device has. An engine that is
restarted starts while the trainer is away, and nothing moves meanwhile (`generating`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Literal

from vime.errors import EngineDead, EngineError
from vime.protocols import TRAINER_PARTS, DeviceUse, Engine, Roster, Trainer, TrainerPart
from vime.types import Metrics

_GIB = 1 << 30
_Phase = Literal["training", "sync", "generation"]


class DeviceTurns:
    """Satisfies `vime.protocols.Turns`. It begins with the trainer on the devices and all engines asleep.

    Args:
        trainer_leaves: whether weights, gradients and optimizer state leave the device while engines generate; if not,
            only what torch has cached is given back.
        lock: held while something moves; re-entrant.

    `roster` may be set to who restarts engines; those that fail here are then left out.
    """

    def __init__(
        self,
        trainer: Trainer,
        engines: Sequence[Engine],
        *,
        trainer_leaves: bool,
        lock: threading.RLock | None = None,
    ) -> None:
        self._trainer, self._engines, self._trainer_leaves = trainer, tuple(engines), trainer_leaves
        self._pool = ThreadPoolExecutor(max(1, len(self._engines)), thread_name_prefix="turns")
        self._phase: _Phase = "training"
        self._metrics: Metrics = {}
        self._moved = threading.Condition(lock)
        self.roster: Roster | None = None

    def to_training(self, *, weights_follow: bool) -> None:
        """Engines sleep, the trainer comes back; nothing where it has the devices already.

        Args: weights_follow: a weight sync comes before the engines generate again, so theirs need not be kept.
        """
        with self._moved:
            if self._phase == "training":
                return
            if self._phase == "generation":
                self._sleep(2 if weights_follow else 1)
            self._onload(TRAINER_PARTS)
            self._phase = "training"
            self._note_memory()

    def to_sync(self) -> None:
        """Both sides' weights are on the devices, and nothing else that is large."""
        with self._moved:
            self.to_training(weights_follow=True)
            self._offload(("state",))
            self._wake("weights")
            self._phase = "sync"
            self._note_memory()

    def to_generation(self) -> None:
        """The engines may generate; after a sync that ended well, or as they went to sleep."""
        with self._moved:
            if self._phase == "generation":
                return
            if self._phase == "training":
                self._offload(("state", "weights"))
                self._wake("weights")
            else:
                self._offload(("weights",))
            self._wake("kv_cache")
            self._phase = "generation"
            self._note_memory()
            self._moved.notify_all()

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Wait until engines may generate; inside, nobody else moves anything."""
        with self._moved:
            self._moved.wait_for(lambda: self._phase == "generation")
            yield

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """The trainer computes log-probs while engines have the devices: they sleep meanwhile, and keep their weights.

        After an error they stay asleep.
        """
        assert self._phase == "generation", self._phase
        self._sleep(1)
        self._onload(("weights",))
        yield
        self._offload(("weights",))
        self._wake("weights")
        self._wake("kv_cache")

    def take_metrics(self) -> Metrics:
        """perf/ and memory/ figures since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _sleep(self, level: int) -> None:
        with self._timed("sleep"):
            self._each("sleep", lambda engine: engine.sleep(level))

    def _wake(self, tag: str) -> None:
        with self._timed("wake"):
            try:
                self._each(f"wake its {tag}", lambda engine: engine.wake([tag]))
            except EngineDead:
                raise
            except EngineError as error:
                raise EngineError(f"{error}; {_room(self._trainer.device_memory())}") from error

    def _offload(self, parts: Sequence[TrainerPart]) -> None:
        with self._timed("offload"):
            self._trainer.offload(parts if self._trainer_leaves else ())

    def _onload(self, parts: Sequence[TrainerPart]) -> None:
        if self._trainer_leaves:
            with self._timed("onload"):
                self._trainer.onload(parts)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        name = f"perf/{what}_time"
        self._metrics[name] = self._metrics.get(name, 0.0) + time.perf_counter() - begin

    def _note_memory(self) -> None:
        if (memory := self._trainer.device_memory()) is not None:
            self._metrics[f"memory/device_used_in_{self._phase}_bytes"] = float(memory.used)

    def _each(self, what: str, call: Callable[[Engine], None]) -> None:
        """Every engine that is there, at once. Raises: EngineError, or EngineDead, with every engine's problem."""
        numbers = range(len(self._engines)) if self.roster is None else self.roster.present()
        futures = {number: self._pool.submit(call, self._engines[number]) for number in numbers}
        failed = [(number, error) for number, future in futures.items() if (error := future.exception())]
        problems = [(n, error) for n, error in failed if self.roster is None or not self.roster.lost(n, error)]
        if problems:
            told = "; ".join(f"engine {number} could not {what}: {error}" for number, error in problems)
            dead = any(isinstance(error, EngineDead) for _, error in problems)
            raise (EngineDead if dead else EngineError)(told) from problems[0][1]


def _room(memory: DeviceUse | None) -> str:
    advice = "lower --vllm-gpu-memory-utilization, or let the trainer leave the device by --offload-train"
    if memory is None:
        return advice
    free = (memory.total - memory.used) / _GIB
    return f"{free:.1f} of {memory.total / _GIB:.1f} GiB of the device are free; {advice}"
