"""That a rollout's groups are whole: each group, sample and episode in one place, after users' functions had them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from vime.config.hooks import UserFunction
from vime.types import Group


def check_whole(function: UserFunction, groups: Sequence[Group]) -> None:
    """What a rollout function returned to train on. Raises: HookError for what would be trained on twice, or mixed."""
    seen_groups: set[int] = set()
    seen_samples: set[int] = set()
    group_of: dict[int, int] = {}
    for group in groups:
        if group.group_id in seen_groups:
            raise function.broken(f"returned group {group.group_id} twice; a group_id names the samples of one prompt")
        seen_groups.add(group.group_id)
        for sample in group.samples:
            if id(sample) in seen_samples:
                raise function.broken(f"returned sample {sample.sample_id} of group {group.group_id} twice")
            seen_samples.add(id(sample))
            if sample.group_id != group.group_id:
                raise function.broken(
                    f"returned sample {sample.sample_id} in group {group.group_id}, but its group_id is "
                    f"{sample.group_id}; hooks and rewards leave it as it is"
                )
            if (other := group_of.setdefault(sample.trajectory_id, group.group_id)) != group.group_id:
                raise function.broken(
                    f"returned trajectory {sample.trajectory_id} in groups {other} and {group.group_id}; every episode "
                    "has a trajectory_id of its own"
                )


@contextmanager
def kept_whole(function: UserFunction, groups: Sequence[Group]) -> Iterator[None]:
    """For the call of a function that looks at groups. Raises: HookError if it changed which samples they hold."""
    before = _places(groups)
    yield
    if _places(groups) != before:
        raise function.broken(
            "added, took out or exchanged groups or samples; it may only look at them and mark samples"
        )


def _places(groups: Sequence[Group]) -> list[tuple[int, int, list[tuple[int, int, int]]]]:
    return [(id(g), g.group_id, [(id(s), s.group_id, s.trajectory_id) for s in g.samples]) for g in groups]
