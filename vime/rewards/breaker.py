"""A circuit breaker: after repeated failures nobody asks the server for a while, then one request tries."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")


pause = asyncio.sleep  # by this name, tests let the cool-down last as long as they like


class BreakerOpen(Exception):
    """The one request that tried has failed as well; nothing was sent for this one."""


class CircuitBreaker:
    """Lets requests pass while the server answers. Used inside one event loop.

    Closed: all pass. After `threshold` failures in a row it opens: requests wait. When `cooldown_s` has passed, one of
    those that wait is sent as a probe. Its success closes the breaker and lets the others pass; its failure doubles the
    cool-down, up to `max_cooldown_s`, and raises BreakerOpen for those that wait.

    Args:
        is_failure: whether an exception says that the server is unwell; others (a refused sample) show that it lives.
    """

    def __init__(
        self,
        is_failure: Callable[[Exception], bool],
        *,
        threshold: int = 5,
        cooldown_s: float = 1.0,
        max_cooldown_s: float = 30.0,
    ) -> None:
        self._is_failure = is_failure
        self._threshold, self._first_cooldown_s, self._max_cooldown_s = threshold, cooldown_s, max_cooldown_s
        self._cooldown_s = cooldown_s
        self._failures = 0
        self._is_open = False
        self._probe: asyncio.Future[bool] | None = None
        self.num_openings = 0

    async def run(self, send: Callable[[], Awaitable[T]]) -> T:
        """The result of `send`, called when requests may pass. Raises: BreakerOpen; what `send` raises."""
        if not self._is_open:
            return await self._send(send)
        if self._probe is not None:
            if not await asyncio.shield(self._probe):
                raise BreakerOpen
            return await self._send(send)
        return await self._send_probe(send)

    async def _send(self, send: Callable[[], Awaitable[T]]) -> T:
        try:
            result = await send()
        except Exception as error:
            if not self._is_failure(error):
                self._failures = 0
            else:
                self._failures += 1
                if self._failures >= self._threshold and not self._is_open:
                    self._is_open = True
                    self.num_openings += 1
                    logger.warning("the reward server failed %d times in a row: requests pause", self._failures)
            raise
        self._failures = 0
        return result

    async def _send_probe(self, send: Callable[[], Awaitable[T]]) -> T:
        probe = self._probe = asyncio.get_running_loop().create_future()
        is_well = False
        try:
            # Jitter, so that several runs that lost the same server do not come back to it at once.
            await pause(self._cooldown_s * random.uniform(0.8, 1.2))
            try:
                result = await send()
            except Exception as error:
                is_well = not self._is_failure(error)
                if not is_well:
                    self._cooldown_s = min(2 * self._cooldown_s, self._max_cooldown_s)
                raise
            is_well = True
            return result
        finally:  # cancelled, too: another request takes its place
            self._probe = None
            if is_well:
                self._is_open, self._failures, self._cooldown_s = False, 0, self._first_cooldown_s
                logger.info("the reward server answers again")
            probe.set_result(is_well)
