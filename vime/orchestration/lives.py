"""The processes that are kept going, as `Keeper` sees them: an engine in its Ray worker, and the router."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from vime.config import FaultConfig
from vime.engine.vllm.control import VllmEngine
from vime.engine.vllm.router import RouterProcess
from vime.errors import EngineDead
from vime.orchestration.front import Front
from vime.orchestration.keeper import NodeLeft
from vime.orchestration.rank_group import wait_all

_SLICE_S = 1.0  # of `failure`
_GRACE_S = 3.0  # of an engine that failed, from the terminating signal to the killing one
_END_S = 60.0  # for its worker to say that it has ended it
_NODE_LOOK_S = 5.0  # between two looks at whether its node is still part of the cluster
_ROUTER_MUTE_S = 30.0  # a router answers in milliseconds


class RouterLife:
    """The router. Satisfies `vime.orchestration.keeper.Life`.

    Args: limits_memory: it is started again where it takes more than `fault` allows.
    """

    def __init__(self, front: Front, fault: FaultConfig, *, limits_memory: bool = True) -> None:
        self._front, self._fault = front, fault
        self._memory_limit = fault.rollout_router_memory_limit_bytes if limits_memory else 0
        self._failures: list[str] = []
        self._watching: threading.Thread | None = None

    def start(self) -> None:
        """See `Life`."""
        self._front.restart()

    def failure(self) -> str | None:
        """See `Life`."""
        if self._watching is None:
            self._failures = []
            self._watching = threading.Thread(
                target=self._watch, args=(self._front.router, self._failures), name="router-health", daemon=True
            )
            self._watching.start()
        self._watching.join(_SLICE_S)
        return self._failures[0] if self._failures else self._too_large()

    def _too_large(self) -> str | None:
        """Its cache-aware policy keeps a tree of prompts, from which vllm-router 0.1.17 frees nothing."""
        limit, size = self._memory_limit, self._front.router.memory_bytes()
        if not 0 < limit < size:
            return None
        return f"it takes {size / 2**30:.2f} GiB (--rollout-router-memory-limit-bytes {limit})"

    def _watch(self, router: RouterProcess, failures: list[str]) -> None:
        try:
            words = router.until_failure(
                interval_s=self._fault.rollout_health_check_interval,
                timeout_s=min(self._fault.rollout_health_check_timeout, _ROUTER_MUTE_S),
            )
        except Exception as error:  # its log is gone, say: nobody would notice its end
            words = f"it cannot be watched: {error!r}"
        failures.append(words)

    def end(self) -> None:
        """See `Life`."""
        self._front.end()
        self._watching = None  # it ends with the process

    def join(self) -> None:
        """It needs nothing."""

    def enlist(self) -> None:
        """Its client was told where it is."""

    def delist(self) -> None:
        """Requests that fail meanwhile are tried again."""


class EngineLife:
    """An engine: its Ray worker, which owns the server, and the handle by which it is called. Satisfies `Life`.

    Args:
        number: of the engine.
        workers: the handles of all engines' workers; its own is replaced when the worker has died.
        make_worker: another one, in the same place.
        start_with: what its server is started with.
        engine: the handle; it moves to the address of each new server.
        front: the router.
        node_is_there: whether its node is part of the cluster.
        give_weights: brings the trainer's weights to the engine, verified.
        start_timeout_s: within which its server must be ready.
    """

    def __init__(
        self,
        number: int,
        *,
        workers: list[Any],
        make_worker: Callable[[], Any],
        start_with: dict[str, Any],
        engine: VllmEngine,
        front: Front,
        node_is_there: Callable[[], bool],
        give_weights: Callable[[], None],
        fault: FaultConfig,
        start_timeout_s: float,
    ) -> None:
        self._number, self._workers, self._make_worker = number, workers, make_worker
        self._start_with, self._engine, self._front = start_with, engine, front
        self._node_is_there, self._give_weights = node_is_there, give_weights
        self._fault, self._start_timeout_s = fault, start_timeout_s
        self._watching: Any = None
        self._question: Future[bool] | None = None
        self._next_question = self._question_after_start()

    def start(self) -> None:
        """See `Life`."""
        try:
            self._check_node()
            worker = self._workers[self._number]
            if worker is None:
                worker = self._workers[self._number] = self._make_worker()
            try:
                self._answer(worker.start.remote(**self._start_with))
                url = self._answer(worker.wait_ready.remote(self._start_timeout_s))
            except EngineDead:
                self._check_node()
                raise
        except NodeLeft:
            # No process was ended there that would have closed its connections: a router waits on them for hours.
            self._front.on_trouble(f"it may wait for answers of engine {self._number}, whose node has left the cluster")
            raise
        self._engine.move_to(url)
        self._question = None  # of the server before
        self._next_question = self._question_after_start()

    def _answer(self, call: Any) -> Any:
        """What its worker says. On a node that is gone before Ray knows it, none is ever started."""
        while not ray.wait([call], timeout=_NODE_LOOK_S)[0]:
            self._check_node()
        return wait_all({call: f"engine {self._number}"}, died=EngineDead)[0]

    def _check_node(self) -> None:
        if not self._node_is_there():
            raise NodeLeft("its node has left the cluster")

    def failure(self) -> str | None:
        """See `Life`."""
        if self._watching is None:
            self._watching = self._workers[self._number].until_failure.remote(self._fault)
        done, _ = ray.wait([self._watching], timeout=_SLICE_S)
        if done:
            self._watching = None
            try:
                words: str = ray.get(done[0])
                return words
            except RayActorError as error:
                return f"its worker died ({error})"
            except RayTaskError as error:
                return f"it cannot be watched: {error}"
        return self._what_the_question_said()

    def _what_the_question_said(self) -> str | None:
        """Now and then the engine core is asked for something, in a thread: a dead process is noticed meanwhile."""
        timeout_s = self._fault.rollout_health_check_timeout
        if self._question is None and time.monotonic() >= self._next_question:
            self._question = Future()
            threading.Thread(
                target=_ask,
                args=(self._engine, timeout_s, self._question),
                name=f"engine-{self._number}-question",
                daemon=True,
            ).start()
        if self._question is None or not self._question.done():
            return None
        is_mute, self._question = self._question.result(), None
        self._next_question = time.monotonic() + max(self._fault.rollout_health_check_interval, timeout_s / 4)
        return (
            f"its workers have not answered for {timeout_s:g} s (--rollout-health-check-timeout)" if is_mute else None
        )

    def end(self) -> None:
        """See `Life`."""
        worker = self._workers[self._number]
        self._watching = None  # ends with the process
        if worker is None:
            return
        try:
            ray.get(worker.stop.remote(_GRACE_S), timeout=_END_S)
        except (RayActorError, GetTimeoutError):
            ray.kill(worker)  # its server ends with it
            self._workers[self._number] = None

    def join(self) -> None:
        """See `Life`. A server that fails or freezes meanwhile is ended, so that nobody waits for its answers."""
        worker, has_joined = self._workers[self._number], threading.Event()
        watching = worker.until_failure.remote(self._fault)

        def end_if_it_fails() -> None:
            while not has_joined.is_set():
                if ray.wait([watching], timeout=_SLICE_S)[0]:
                    self.end()
                    return

        guard = threading.Thread(target=end_if_it_fails, name=f"engine-{self._number}-join", daemon=True)
        guard.start()
        try:
            self._give_weights()
        finally:
            has_joined.set()
            guard.join()
        self._watching = watching

    def enlist(self) -> None:
        """See `Life`."""
        self._front.add(self._engine.url)

    def delist(self) -> None:
        """See `Life`."""
        self._front.remove(self._engine.url)

    def _question_after_start(self) -> float:
        return (
            time.monotonic() + self._fault.rollout_health_check_first_wait + self._fault.rollout_health_check_interval
        )


def _ask(engine: VllmEngine, timeout_s: float, question: Future[bool]) -> None:
    try:
        question.set_result(engine.is_mute(timeout_s))
    except BaseException as error:
        question.set_exception(error)


def alive_nodes() -> Collection[str]:
    """Ids of the nodes of the cluster."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
