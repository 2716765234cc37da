"""How often something that failed may be started again, and how long is waited before."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from vime.config import FaultConfig

_LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """The limits of one engine, or of the router."""

    max_restarts: int
    """Within the window; the next failure is the last."""
    window_s: float
    backoff_s: float
    """Before the second restart of a window; the first is at once, each further one waits twice as long."""

    @classmethod
    def of(cls, fault: FaultConfig) -> RestartPolicy:
        """What the settings say."""
        return cls(
            max_restarts=fault.rollout_max_restarts,
            window_s=fault.rollout_restart_window_s,
            backoff_s=fault.rollout_restart_backoff_s,
        )


class RestartBudget:
    """Counts the restarts of one thing.

    Args: clock: seconds that only grow.
    """

    def __init__(self, policy: RestartPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy, self._clock = policy, clock
        self._starts: deque[float] = deque()

    def take(self) -> float | None:
        """Another restart is wanted. Returns: seconds to wait before it; None if there were too many."""
        now = self._clock()
        while self._starts and now - self._starts[0] >= self._policy.window_s:
            self._starts.popleft()
        before = len(self._starts)
        if before >= self._policy.max_restarts:
            return None
        self._starts.append(now)
        return min(self._policy.backoff_s * 2 ** (before - 1), _LONGEST_WAIT_S) if before else 0.0

    @property
    def limit(self) -> str:
        """In words, for the error that ends the run."""
        return (
            f"{self._policy.max_restarts} restarts within {self._policy.window_s:g} s are allowed "
            "(--rollout-max-restarts, --rollout-restart-window-s)"
        )
