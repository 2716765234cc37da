"""What an engine that was restarted gets: the trainer's weights as they are, under their own version."""

from __future__ import annotations

import time
from collections.abc import Callable

from vime.errors import EngineDead
from vime.loop.staleness import version_after
from vime.orchestration.workers import TrainerGroup
from vime.types import PolicyVersion
from vime.weight_sync.plan import WeightSync

_AGAIN_S = 0.5


class CurrentWeights:
    """Brings engines the weights, as soon as the trainer is in no call.

    While one rollout is trained on and the next is generated, the trainer may be ahead of what the other engines have;
    the restarted one then begins with the newer version. Where engines do not say which version sampled a token, all of
    them must have the same one: there it waits for the next weight sync, unless no other engine serves.

    Args:
        start: the first rollout of the run.
        tells_versions: whether engines say which version sampled a token.
        num_serving: engines that generate right now.
        is_joining: whether an engine, by its number, still waits for its weights; not where a weight sync, which calls
            it, too, has found it dead.
        on_version: told when the version of all engines has changed.
    """

    def __init__(
        self,
        trainer: TrainerGroup,
        sync: WeightSync,
        *,
        start: int,
        tells_versions: bool,
        num_serving: Callable[[], int],
        is_joining: Callable[[int], bool],
        on_version: Callable[[PolicyVersion], None],
    ) -> None:
        self._trainer, self._sync, self._start = trainer, sync, start
        self._tells_versions, self._num_serving, self._on_version = tells_versions, num_serving, on_version
        self._is_joining = is_joining

    def give(self, number: int) -> None:
        """To the engine of this number. Raises: as `WeightSync.join`; EngineDead if it failed before its turn came."""
        while self._is_joining(number):
            # Who has the trainer may wait for the end of this engine, which its keeper, waiting here, would not notice.
            if not self._trainer.lock.acquire(timeout=_AGAIN_S):
                continue
            try:
                if self._has_joined(number):
                    return
            finally:
                self._trainer.lock.release()
            time.sleep(_AGAIN_S)
        raise EngineDead(f"engine {number} failed again before it had its weights")

    def _has_joined(self, number: int) -> bool:
        last = self._trainer.last_trained
        version = version_after(self._start - 1 if last is None else last)
        is_alone = not self._num_serving()
        if not (self._tells_versions or version == self._sync.version or is_alone):
            return False
        self._sync.join(number, version)
        if is_alone:
            self._on_version(version)
        return True
