"""What becomes of groups that are older than --max-staleness allows when the trainer could have them."""

from __future__ import annotations

from collections.abc import Sequence

from vime.data.versions import mask_before
from vime.types import Group, Metrics, PolicyVersion

ACTIONS = ("drop", "mask", "correct")


class StaleGroups:
    """By the version of tokens, and the trainer's.

    Args:
        max_staleness: versions that a trainable token may be behind.
        action: of a group with an older one: "drop": it is left out, and its prompt is generated anew; "mask": its old
            tokens get no gradient, the others do; "correct": it is trained on, and importance weights correct it.
        masks_all_but_last: no token gets a gradient but those of a sample's newest version.
    Raises: ValueError for another action.
    """

    def __init__(self, max_staleness: int, action: str, *, masks_all_but_last: bool = False) -> None:
        if action not in ACTIONS:
            raise ValueError(f"{action!r} is none of {ACTIONS}")
        self._max, self._action, self._all_but_last = max_staleness, action, masks_all_but_last
        self._dropped = self._masked = 0

    def leaves_out(self, oldest: PolicyVersion, trainer: PolicyVersion) -> bool:
        """Whether a group is not trained on. Args: oldest: of its trainable tokens; trainer: the version it has."""
        is_old = self._action == "drop" and trainer - oldest > self._max
        self._dropped += is_old
        return is_old

    def mask(self, groups: Sequence[Group], trainer: PolicyVersion) -> None:
        """Take the gradient from what is too old in groups that are trained on."""
        for sample in (sample for group in groups for sample in group.samples):
            if self._action == "mask":
                self._masked += mask_before(sample, trainer - self._max)
            if self._all_but_last and sample.weight_versions:
                self._masked += mask_before(sample, sample.weight_versions[-1].version)

    def take_metrics(self) -> Metrics:
        """Since the last call."""
        metrics: Metrics = {
            "stream/dropped_stale_groups": float(self._dropped),
            "stream/masked_stale_tokens": float(self._masked),
        }
        self._dropped = self._masked = 0
        return metrics
