"""One rollout that is generated in a thread of its own, while the loop does something else."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from types import TracebackType

from vime.loop.sync import Rollout
from vime.observability.trace import Span
from vime.types import PolicyVersion, RolloutResult

_log = logging.getLogger(__name__)

_AGAIN_S = 1.0  # a rollout that has not ended by then is called off once more
_PATIENCE_S = 30.0  # after an error; a rollout function that cannot be stopped is left behind then


@dataclass(frozen=True, slots=True)
class Generated:
    """A rollout, and when it was generated."""

    result: RolloutResult
    version: PolicyVersion
    """Of the weights that generated it."""
    span: Span
    seconds: float
    """It took."""
    end: float
    """On time.perf_counter."""


class RolloutAhead:
    """At most one rollout under way. Order of calls: `start`, then `take`; `wait` and `call_off` in between.

    As a context manager it calls off what is under way when an error ends the loop.
    """

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._thread: threading.Thread | None = None
        self._made: Generated | None = None
        self._failure: BaseException | None = None
        self._is_called_off = False

    def start(self, rollout_id: int, version: PolicyVersion) -> None:
        """Begin to generate. Args: version: of the weights that the engines have."""
        assert self._thread is None, "the rollout before was neither taken nor called off"
        self._made, self._failure, self._is_called_off = None, None, False
        # A daemon: a rollout function that never returns must not keep the program from ending.
        self._thread = threading.Thread(
            target=self._generate,
            args=(rollout_id, version, time.time(), time.perf_counter()),
            name=f"rollout-{rollout_id}",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Until the rollout that was started, if any, is there. Raises: whatever ended its generation."""
        if self._thread is None:
            return
        self._thread.join()
        if self._failure is not None:
            self._thread = None
            raise self._failure

    def take(self) -> Generated:
        """The rollout that was started. Raises: as `wait`."""
        assert self._thread is not None, "no rollout was started"
        self.wait()
        self._thread = None
        assert self._made is not None
        return self._made

    def call_off(self, patience_s: float | None = None) -> None:
        """End the generation of what nobody will train on.

        Args: patience_s: at most so long is waited; None: until it has ended.
        """
        self._is_called_off = True
        give_up = None if patience_s is None else time.monotonic() + patience_s
        while self._thread is not None and self._thread.is_alive():
            self._rollout.call_off()
            self._thread.join(_AGAIN_S if give_up is None else max(0.0, min(_AGAIN_S, give_up - time.monotonic())))
            if give_up is not None and time.monotonic() >= give_up and self._thread.is_alive():
                _log.warning("%s does not end; it is left behind", self._thread.name)
                break
        self._thread = None

    def __enter__(self) -> RolloutAhead:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.call_off(_PATIENCE_S)

    def _generate(self, rollout_id: int, version: PolicyVersion, begin_s: float, begin: float) -> None:
        try:
            result = self._rollout.generate(rollout_id)
        except BaseException as error:  # raised again by `wait`
            self._failure = error
            if not self._is_called_off:
                _log.warning("rollout %d cannot be generated, which ends the run: %s", rollout_id, error)
            return
        end = time.perf_counter()
        span = {"name": "rollout", "start_s": begin_s, "end_s": time.time(), "rollout_id": rollout_id}
        self._made = Generated(result, version, span, end - begin, end)
