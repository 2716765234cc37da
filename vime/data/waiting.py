"""The groups that wait in a buffer to be handed out again: first in, first out, or those of the oldest policy first.

Putting one back and taking one out cost the same however many wait: with over-sampling and filters a rollout does both
thousands of times.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator

from vime.types import Group


class WaitingGroups:
    """Ordered by `key`, equals as they came. Args: key: of a group, which must not change while it waits."""

    def __init__(self, key: Callable[[Group], float] = lambda group: 0.0) -> None:
        self._key = key
        self._heap: list[tuple[float, int, Group]] = []
        self._ids: set[int] = set()
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._ids

    def __iter__(self) -> Iterator[Group]:
        """In the order in which they would be taken."""
        return (group for _, _, group in sorted(self._heap))

    def add(self, groups: Iterable[Group]) -> None:
        """These wait, too; none of them does already."""
        for group in groups:
            heapq.heappush(self._heap, (self._key(group), next(self._arrivals), group))
            self._ids.add(group.group_id)

    def take(self, n: int) -> list[Group]:
        """The first n, or all if there are fewer; they leave."""
        taken = [heapq.heappop(self._heap)[2] for _ in range(min(max(n, 0), len(self._heap)))]
        self._ids.difference_update(group.group_id for group in taken)
        return taken

    def replace(self, groups: Iterable[Group]) -> None:
        """These wait, and no others."""
        self._heap, self._ids = [], set()
        self.add(groups)
