"""The accounting of a journal: every prompt in exactly one place, none skipped, none twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vime.data.journal import Journal
from vime.data.journal_life import LOST, STAGES, UNDONE, Life

_SHOWN = 20  # gaps that are listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a journal says of all prompts that were handed out."""

    stages: dict[str, int]
    """Groups by stage, see `vime.data.journal_life.STAGES`."""
    reasons: dict[str, int]
    """Groups that were dropped, by reason."""
    oldest: Life | None
    """Of the groups that were handed out and have not ended, the one that was taken first."""
    num_reused: int
    """Groups whose responses a resumed run has used again."""
    num_again: int
    """Groups that were generated again, for a lost version of the policy had sampled them."""
    lost: list[str]
    """Prompts that nobody has any more, a sentence each."""
    doubled: list[str]
    """Prompts that were handed out or trained on twice, a sentence each."""

    @property
    def is_exact(self) -> bool:
        """No prompt is lost and none doubled."""
        return not self.lost and not self.doubled


def account_of(path: Path) -> Account:
    """The account of a journal's file, of a run that goes on or has ended in any way.

    Raises: DataError if there is no journal, or it is damaged.
    """
    journal = Journal.read(path)
    try:
        journal.check_file()
        return account(journal)
    finally:
        journal.close()


def account(journal: Journal) -> Account:
    """The account of a journal."""
    stages = dict.fromkeys(STAGES, 0) | dict(journal.query("SELECT stage, count(*) FROM lives GROUP BY stage"))
    reasons = dict(
        journal.query("SELECT reason, count(*) FROM lives WHERE stage = 'dropped' GROUP BY reason ORDER BY 2 DESC")
    )
    notes = dict(journal.query("SELECT what, count(*) FROM notes GROUP BY what"))
    first = journal.query("SELECT group_id FROM lives WHERE stage IN ('taken', 'finished') ORDER BY taken_s LIMIT 1")
    return Account(
        stages=stages,
        reasons=reasons,
        oldest=next(journal.lives("group_id = ?", first[0])) if first else None,
        num_reused=notes.get("reused", 0),
        num_again=notes.get("again", 0),
        lost=list(_lost(journal)),
        doubled=list(_doubled(journal)),
    )


def _lost(journal: Journal) -> Iterator[str]:
    for life in journal.lives("stage = ?", [LOST]):
        details = [note.detail for note in journal.notes(life.group_id) if note.what == "lost"]
        yield f"group {life.group_id} ({prompt_of(life)}) {'; '.join(filter(None, details[-1:])) or 'is lost'}"
    meta = journal.meta()
    begin = int(meta.get("first_group_id", 0))
    # The data buffer numbers groups one after another, and says of each which prompt it is.
    rows = journal.query(
        "SELECT min(group_id), max(group_id), count(*) FROM lives WHERE epoch IS NOT NULL AND group_id >= ?", [begin]
    )
    low, high, count = rows[0]
    if count and (low > begin or high - low + 1 > count):
        missing = high - begin + 1 - count
        yield f"of the groups {begin} to {high} {missing} are not in the journal: {_gaps(journal, begin)}"
    size = json.loads(meta.get("epoch_size", "null"))
    if size is None or json.loads(meta.get("mixed", "false")) or begin:
        return
    for epoch, found in journal.query(
        "SELECT epoch, count(DISTINCT idx) FROM lives WHERE epoch < (SELECT max(epoch) FROM lives) GROUP BY epoch"
    ):
        if found != size:
            yield f"epoch {epoch} has {found} of its {size} prompts, and the next one has begun"


def _gaps(journal: Journal, begin: int) -> str:
    rows = journal.query(
        "SELECT group_id, before FROM (SELECT group_id, lag(group_id, 1, ?) OVER (ORDER BY group_id) AS before "
        "FROM lives WHERE group_id >= ?) WHERE group_id > before + 1 LIMIT ?",
        [begin - 1, begin, _SHOWN],
    )
    return ", ".join(f"{low + 1} to {high - 1}" if high > low + 2 else str(low + 1) for high, low in rows)


def _doubled(journal: Journal) -> Iterator[str]:
    for note in journal.notes():
        if note.what == "doubled":
            yield f"group {note.group_id} {note.detail}"
    for epoch, index, ids in journal.query(
        "SELECT epoch, idx, group_concat(group_id, ', ') FROM lives WHERE epoch IS NOT NULL AND stage NOT IN (?, ?) "
        "GROUP BY epoch, idx HAVING count(*) > 1",
        [UNDONE, LOST],
    ):
        yield f"prompt {index} of epoch {epoch} is in groups {ids}"


def prompt_of(life: Life) -> str:
    """Which prompt a group is, in words."""
    return "prompt unknown" if life.epoch is None else f"prompt {life.idx} of epoch {life.epoch}"
