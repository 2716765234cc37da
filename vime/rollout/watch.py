"""Says which line holds up the event loop of a rollout: nothing can end it, but it can be named."""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType

logger = logging.getLogger(__name__)

_BEAT_S = 1.0  # between two signs of life of the loop
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


class LoopWatch:
    """While it is entered, warns when the running event loop does nothing else than one call for `limit_s` seconds.

    A user's function that computes or blocks without awaiting stops all requests, rewards and time limits.

    Args:
        limit_s: until the first warning; each further one takes as long again as all before.
        clock: seconds that only grow.
    """

    def __init__(self, limit_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        self.last_beat = clock()
        """When the loop last gave a sign of life."""
        self._ended = threading.Event()

    async def __aenter__(self) -> LoopWatch:
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._beat()
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._timer.cancel()

    def _beat(self) -> None:
        self.last_beat = self._clock()
        self._timer = self._loop.call_later(min(_BEAT_S, self._limit_s / 4), self._beat)

    def _watch(self) -> None:
        warn_at = self._limit_s
        while not self._ended.wait(min(_BEAT_S, self._limit_s / 4)):
            silent_s = self._clock() - self.last_beat
            if silent_s < self._limit_s:
                warn_at = self._limit_s
            elif silent_s >= warn_at:
                warn_at = 2 * silent_s
                logger.warning(
                    "all of the rollout has stood still for %.0f s %s: a function that computes or blocks there holds "
                    "up every request and time limit; await, or move the work into asyncio.to_thread",
                    silent_s,
                    self._place(),
                )

    def _place(self) -> str:
        frame = sys._current_frames().get(self._thread_id)
        if frame is None:
            return "somewhere"
        frames = traceback.extract_stack(frame)
        own = [f for f in frames if not f.filename.startswith(_LIBRARIES)] or list(frames)
        return f"in {own[-1].filename}, line {own[-1].lineno}, in {own[-1].name}"
