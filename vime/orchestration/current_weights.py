"""What an engine that was restarted gets: the trainer's weights as they are, under their own version."""

from __future__ import annotations

import time
from collections.abc import Callable

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
        on_version: Callable[[PolicyVersion], None],
    ) -> None:
        self._trainer, self._sync, self._start = trainer, sync, start
        self._tells_versions, self._num_serving, self._on_version = tells_versions, num_serving, on_version

    def give(self, number: int) -> None:
        """To the engine of this number. Raises: as `WeightSync.join`."""
        while True:
            with self._trainer.lock:
                last = self._trainer.last_trained
                version = version_after(self._start - 1 if last is None else last)
                is_alone = not self._num_serving()
                if self._tells_versions or version == self._sync.version or is_alone:
                    self._sync.join(number, version)
                    if is_alone:
                        self._on_version(version)
                    return
            time.sleep(_AGAIN_S)
