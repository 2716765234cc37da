"""Groups that wait to be handed out again."""

from __future__ import annotations

from vime.data.waiting import WaitingGroups
from vime.types import Group, Sample


def test_waiting_groups_cost_the_same_however_many_there_are() -> None:
    """Counted in looks at a group, not in time."""
    looks = 0

    def key(group: Group) -> float:
        nonlocal looks
        looks += 1
        return -group.group_id % 7

    waiting = WaitingGroups(key)
    groups = [Group(i, [Sample(prompt="p", tokens=(1,), group_id=i)]) for i in range(2000)]
    for group in groups:
        waiting.add([group])
    assert looks == len(groups) == len(waiting) and 5 in waiting and 2000 not in waiting
    in_order = sorted(groups, key=lambda group: (-group.group_id % 7, group.group_id))
    assert list(waiting) == in_order
    looks = 0
    assert [group for _ in range(1000) for group in waiting.take(2)] == in_order
    assert looks == 0 and not waiting and 5 not in waiting and waiting.take(3) == []
