"""Which engines of a run are there right now; what weight sync, turns and clients ask while others are restarted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from enum import Enum

from vime.errors import EngineDead, VimeError


class EngineState(Enum):
    """Of one engine."""

    SERVING = "serving"
    """Behind the router."""
    JOINING = "joining"
    """Its server answers, but its weights are not verified yet."""
    DOWN = "down"
    """Ended, and to be started again."""
    GIVEN_UP = "given up"
    """Its node has left; the run goes on without it."""


class Roster:
    """The state of every engine and of the router. All methods may be called from any thread.

    Satisfies `vime.protocols.Roster` and `vime.engine.vllm.retries.Outages`. `restarts` counts what was started again:
    "engine", "router".

    Args:
        num_engines: all serving.
        is_sick: whether an engine that failed in a call is to be ended and restarted for it.
        condemn: tells its keeper so, with the cause.
        wait_ended: returns when nothing is left of an engine that failed.
        notice_s: within so many seconds one that serves no longer is found out.
    """

    def __init__(
        self,
        num_engines: int,
        is_sick: Callable[[int, BaseException], bool],
        condemn: Callable[[int, str], None] = lambda number, cause: None,
        wait_ended: Callable[[int], None] = lambda number: None,
        notice_s: float = 0.0,
    ) -> None:
        self.notice_s = notice_s
        self._changed = threading.Condition()
        self._states = [EngineState.SERVING] * num_engines
        self._num_ends = [0] * num_engines
        self._router_is_up = True
        self._is_sick, self._condemn, self._wait_ended = is_sick, condemn, wait_ended
        self._failure: BaseException | None = None
        self.restarts: Counter[str] = Counter()

    def present(self) -> list[int]:
        """The engines that may be called. Raises: what ends the run."""
        with self._changed:
            self._check()
            return self._those(EngineState.SERVING, EngineState.JOINING)

    def serving(self) -> list[int]:
        """The engines that generate."""
        with self._changed:
            return self._those(EngineState.SERVING)

    def is_joining(self, number: int) -> bool:
        """Whether an engine's server is back, and waits for its weights."""
        with self._changed:
            return self._states[number] is EngineState.JOINING

    def given_up(self) -> list[int]:
        """The engines that the run goes on without."""
        with self._changed:
            return self._those(EngineState.GIVEN_UP)

    def lost(self, number: int, error: BaseException) -> bool:
        """An engine failed in a call. Returns: whether it is started again, so that the others are to go on; it has
        been ended then, and holds nothing of what it shared with them."""
        with self._changed:
            is_gone = self._states[number] in (EngineState.DOWN, EngineState.GIVEN_UP)
            num_ends = self._num_ends[number]
        if not is_gone:
            if not isinstance(error, VimeError) or not self._is_sick(number, error):
                return False
            with self._changed:
                # Its keeper may have noticed by itself while it was asked how it is: the next life is not to blame.
                if self._num_ends[number] == num_ends and self._states[number] is not EngineState.GIVEN_UP:
                    self._condemn(number, str(error))
                    self._states[number] = EngineState.DOWN  # nobody calls it until its keeper has restarted it
                    self._changed.notify_all()
        self._wait_ended(number)
        return True

    def wait_whole(self) -> None:
        """Until every engine that was not given up is there. Raises: what ends the run."""
        with self._changed:
            while EngineState.DOWN in self._states:
                self._check()
                self._changed.wait()
            self._check()

    def check(self) -> None:
        """Raises: what ends the run, if it cannot go on."""
        with self._changed:
            self._check()

    def is_under_way(self) -> bool:
        """Whether an engine or the router is being restarted."""
        with self._changed:
            down = self._those(EngineState.DOWN, EngineState.JOINING)
            return bool(down) or not self._router_is_up

    def set(self, number: int, state: EngineState) -> None:
        """What its keeper says of an engine."""
        with self._changed:
            if state is EngineState.SERVING and self._states[number] is not EngineState.SERVING:
                self.restarts["engine"] += 1
            if state is EngineState.DOWN:
                self._num_ends[number] += 1
            self._states[number] = state
            if set(self._states) == {EngineState.GIVEN_UP}:
                self._failure = self._failure or EngineDead("no engine is left: their nodes have left the cluster")
            self._changed.notify_all()

    def set_router(self, is_up: bool) -> None:
        """What its keeper says of the router."""
        with self._changed:
            self.restarts["router"] += is_up and not self._router_is_up
            self._router_is_up = is_up
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """The run cannot go on; everybody who asks is told so."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _those(self, *states: EngineState) -> list[int]:
        return [number for number, state in enumerate(self._states) if state in states]

    def _check(self) -> None:
        if self._failure is not None:
            # A new object each time: it may be raised in several threads, each with a traceback of its own.
            kind = type(self._failure) if isinstance(self._failure, VimeError) else EngineDead
            raise kind(str(self._failure)) from self._failure
