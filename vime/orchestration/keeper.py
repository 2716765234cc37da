"""Keeps one engine, or the router, going: watched, ended when it fails, started again, verified, put back to work.

    serving ── fails ──> out of the router, process ended ── backoff ──> started ── weights, probe ──> serving
                                          └── too many restarts: the run ends with the cause of the last failure

One thread each, on nothing but the handles it is given.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from vime.errors import EngineDead, EngineError, WeightSyncError
from vime.observability.trace import SpanLog
from vime.orchestration.restarts import RestartBudget
from vime.orchestration.roster import EngineState, Roster

_log = logging.getLogger(__name__)

_ENDED_S = 120.0  # at most, for what is left of a process that failed
_JOIN_S = 5.0  # of a keeper at the end of the run, which may be inside a call that ends with its process


class NodeLeft(EngineDead):
    """The engine's node is not part of the cluster any more."""


class Life(Protocol):
    """A process that can be started again."""

    def start(self) -> None:
        """Start it, and block until it serves. Raises: EngineError; NodeLeft if it never can."""

    def failure(self) -> str | None:
        """What is wrong with it, in words; blocks for a moment to see it fail. None: nothing."""

    def end(self) -> None:
        """End what is left of it; harmless when nothing is."""

    def join(self) -> None:
        """It serves: bring it what it needs. Raises: EngineError, WeightSyncError if it is not fit for work."""

    def enlist(self) -> None:
        """It is fit: let others use it."""

    def delist(self) -> None:
        """It failed: nobody uses it any more."""


class Keeper:
    """The thread that keeps one `Life` going. `start` it; `close` it before the process is ended for good.

    Args:
        name: in words, for logs and errors: "engine 0", "the router".
        life: its process.
        budget: how often it may be started again.
        on_state: told of each change.
        on_end: told what ends the run.
        place: entered for the time of a restart, where it needs room that others must not take meanwhile.
    """

    def __init__(
        self,
        name: str,
        life: Life,
        budget: RestartBudget,
        *,
        on_state: Callable[[EngineState], None],
        on_end: Callable[[BaseException], None],
        place: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._name, self._life, self._budget = name, life, budget
        self._on_state, self._on_end, self._place = on_state, on_end, place
        self._closing = threading.Event()
        self._condemned: str | None = None
        self._has_ended = threading.Event()
        self._has_ended.set()
        self._thread = threading.Thread(target=self._run, name=f"keeper of {name}", daemon=True)
        self.spans = SpanLog()
        """One span for each restart."""

    def start(self) -> None:
        """Begin to watch; it serves."""
        self._thread.start()

    def condemn(self, cause: str) -> None:
        """It failed in a call: end it and start it again, whatever its health says."""
        self._has_ended.clear()
        self._condemned = cause

    def wait_ended(self) -> None:
        """Of one that failed: until nothing is left of it that holds memory, or writes where others do."""
        if threading.current_thread() is not self._thread:
            self._has_ended.wait(_ENDED_S)

    def dismiss(self) -> None:
        """Watch and start nothing any more; `close` follows."""
        self._closing.set()

    def close(self) -> None:
        """Wait for the thread's end, which a restart under way may put off for longer than that."""
        self.dismiss()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                cause = self._condemned or self._life.failure()
                if cause is not None and not self._closing.is_set() and not self._restart(cause):
                    return
        except BaseException as error:  # of the trainer that was to send its weights, or a fault here
            if not self._closing.is_set():
                _log.exception("%s cannot be looked after any more", self._name)
                self._on_end(error)

    def _restart(self, cause: str) -> bool:
        """Until it serves again. Returns: whether it does; False after the end of the run, or of its node."""
        first_line = cause.partition("\n")[0]
        with self.spans.span("restart", cause=first_line):
            while True:
                self._has_ended.clear()
                self._on_state(EngineState.DOWN)
                self._life.delist()
                delay = self._budget.take()
                self._life.end()
                self._condemned = None
                self._has_ended.set()
                if delay is None:
                    self._on_end(
                        EngineDead(f"{self._name} failed and is not started again: {self._budget.limit}; {cause}")
                    )
                    return False
                _log.warning("%s failed and is started again: %s", self._name, cause)
                if self._closing.wait(delay):
                    return False
                try:
                    with self._place():
                        self._life.start()
                        if self._closing.is_set():
                            return False
                        self._on_state(EngineState.JOINING)
                        self._life.join()
                        self._life.enlist()
                        self._on_state(EngineState.SERVING)
                except NodeLeft as error:
                    _log.warning("%s: %s; the run goes on without it", self._name, error)
                    self._on_state(EngineState.GIVEN_UP)
                    return False
                except (EngineError, WeightSyncError) as error:
                    cause = f"it was started again, but {error}"
                    continue
                _log.warning("%s serves again", self._name)
                return True


def keep_engine_state(roster: Roster, number: int) -> Callable[[EngineState], None]:
    """Tells the roster of an engine's changes."""
    return lambda state: roster.set(number, state)


def keep_router_state(roster: Roster) -> Callable[[EngineState], None]:
    """Tells the roster whether the router is up."""
    return lambda state: roster.set_router(state is EngineState.SERVING)
