"""What the journal says of a group: its stages, its life, notes, and what a resume found."""

from __future__ import annotations

from dataclasses import dataclass, fields

from vime.types import Group, PolicyVersion

TAKEN, FINISHED, PUT_BACK, TRAINED, DROPPED = "taken", "finished", "put_back", "trained", "dropped"
UNDONE, LOST = "undone", "lost"
STAGES = (TAKEN, FINISHED, PUT_BACK, TRAINED, DROPPED, UNDONE, LOST)
"""taken: handed out, or scored but not yet finished · finished: waits to be trained on · put_back: waits in the source
to be handed out again · trained, dropped: ended · undone: taken after the checkpoint that the run went on from, so its
prompt comes again · lost: nobody knows of it any more."""
ENDED = (TRAINED, DROPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What became of one group. Times are Unix seconds; None: that has not happened."""

    group_id: int
    epoch: int | None
    """With `idx` the prompt; None where the data source does not say."""
    idx: int | None
    stage: str
    """One of `STAGES`."""
    reason: str | None
    """Of a drop."""
    rollout_id: int | None
    """The rollout that has taken it last, or was trained on."""
    oldest: PolicyVersion | None
    newest: PolicyVersion | None
    """The policy versions of its tokens."""
    num_samples: int
    num_tokens: int | None
    """Of all responses."""
    num_taken: int
    num_finished: int
    num_put_back: int
    taken_s: float
    """When it was taken last."""
    generated_s: float | None
    finished_s: float | None
    """When it was rewarded, too."""
    ended_s: float | None
    """When it was trained on or dropped."""
    born: int
    """The event that first took it."""
    changed: int
    """The event that changed it last."""

    @property
    def is_open(self) -> bool:
        """Neither trained on nor dropped: somebody has to have it."""
        return self.stage in (TAKEN, FINISHED, PUT_BACK)


COLUMNS = tuple(field.name for field in fields(Life))


@dataclass(frozen=True, slots=True)
class Note:
    """Something out of the ordinary in a group's life, or a run's (no group)."""

    at_s: float
    group_id: int | None
    what: str
    """start, resume, reused, again, doubled, lost, unsaved"""
    detail: str | None


@dataclass(frozen=True, slots=True)
class Rewound:
    """What a resume found."""

    finished: frozenset[int]
    """Groups that need not be generated again."""
    partial: frozenset[int]
    """Groups whose tokens can be gone on from."""
    num_waiting: int
    num_undone: int
    num_lost: int


def versions_of(group: Group) -> tuple[PolicyVersion | None, PolicyVersion | None]:
    """The oldest and the newest policy version of a group's tokens; None where none is known."""
    found = {span.version for sample in group.samples for span in sample.weight_versions}
    return (min(found), max(found)) if found else (None, None)
