"""The journal of a run's prompts: what became of each, in an SQLite file that is whole however the run ends.

A group's life: taken from the data source; finished, that is generated and rewarded; then trained on, or dropped with a
reason. One that was put back waits to be taken again. Each call is one transaction, so that a reader beside the run, or
after it was killed, sees all of it or none. What a resumed run can still use of a finished group, or of one put back
with its tokens, is kept as bytes until it is trained on and saved.

Which prompt comes next is not decided here: a checkpoint says that, and names the event of the journal it was made at.
A resume undoes what came after (`rewind`).
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vime.data.journal_life import (
    COLUMNS,
    DROPPED,
    ENDED,
    FINISHED,
    LOST,
    PUT_BACK,
    TRAINED,
    UNDONE,
    Life,
    Note,
    Rewound,
    versions_of,
)
from vime.data.journal_schema import naming, open_to_read, open_to_write
from vime.data.payload import group_from_bytes, group_to_bytes
from vime.errors import DataError
from vime.types import Group, PolicyVersion


class Journal:
    """One per run; all calls may come from any thread. `Journal.read` opens one to look at.

    Args:
        path: of the file; made where it is not there.
        keeps_payloads: keep what a resume can use; False where no checkpoint will be written.
        version: of the newest weights that a resume would find: those of the checkpoint the run goes on from.
    Raises: DataError if the file is no journal or is damaged; OSError naming it if it cannot be written, here and in
        every call that writes.
    """

    def __init__(self, path: Path, *, keeps_payloads: bool = True, version: PolicyVersion = 1) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._keeps_payloads = keeps_payloads
        self._saved_version = version
        self._connection = open_to_write(path)
        meta = self.meta()
        self._event = self._last_event(meta)
        self.id = meta.get("id") or uuid.uuid4().hex
        """Names this journal in the checkpoints that belong to it."""
        if "id" not in meta:
            self.set_meta(id=self.id)

    @classmethod
    def read(cls, path: Path) -> Journal:
        """To look at alone: the calls that write fail. Raises: DataError if there is none, or it is damaged."""
        journal = cls.__new__(cls)
        journal.path, journal._lock, journal._keeps_payloads = path, threading.RLock(), False
        journal._saved_version = 0
        journal._connection = open_to_read(path)
        meta = journal.meta()
        journal._event, journal.id = journal._last_event(meta), meta.get("id", "")
        return journal

    def check_file(self) -> None:
        """Raises: DataError if the file is damaged."""
        if (said := self.query("PRAGMA quick_check(1)")) != [("ok",)]:
            raise DataError(f"{self.path}: the journal of the data buffer is damaged: {said[0][0]}")

    def close(self) -> None:
        """The file is whole without it; this moves the log into it."""
        with self._lock, naming(self.path):
            self._connection.close()

    # What happens to groups -------------------------------------------------------------------------------------------

    def taken(self, groups: Sequence[Group], rollout_id: int) -> None:
        """Handed out by the data source, for this rollout."""
        now = time.time()
        with self._write() as event:
            for group in groups:
                epoch, index = group.place if group.place is not None else (None, None)
                row = self._row(group.group_id, "stage, num_taken, epoch")
                if row is not None and row[0] in ENDED and epoch is not None:
                    self._note(group.group_id, "doubled", f"handed out in rollout {rollout_id}, but was {row[0]}")
                if row is None or (row[0] in ENDED and epoch is None):  # a source of the user's may use ids again
                    self._execute(
                        "INSERT OR REPLACE INTO lives VALUES (?, ?, ?, 'taken', NULL, ?, NULL, NULL, ?, NULL, 1, 0, 0, "
                        "?, NULL, NULL, NULL, ?, ?)",
                        (group.group_id, epoch, index, rollout_id, len(group.samples), now, event, event),
                    )
                else:
                    self._execute(
                        "UPDATE lives SET stage = 'taken', reason = NULL, rollout_id = ?, num_taken = num_taken + 1, "
                        "epoch = coalesce(epoch, ?), idx = coalesce(idx, ?), taken_s = ?, ended_s = NULL, changed = ?, "
                        "generated_s = NULL, finished_s = NULL, "
                        "born = CASE stage WHEN 'undone' THEN ? ELSE born END WHERE group_id = ?",
                        (rollout_id, epoch, index, now, event, event, group.group_id),
                    )

    def finished(self, group: Group, *, keep: bool = True) -> None:
        """Generated and rewarded. What a resume needs of it is kept, where it may be used in one, and unless told."""
        now = time.time()
        oldest, newest = versions_of(group)
        ends = [s["end_s"] for sample in group.samples for s in sample.trace if s.get("name") == "generate"]
        with self._write() as event:
            self._execute(
                "UPDATE lives SET stage = 'finished', oldest = ?, newest = ?, num_samples = ?, num_tokens = ?, "
                "num_finished = num_finished + ?, generated_s = ?, finished_s = ?, changed = ? WHERE group_id = ?",
                (
                    *(oldest, newest, len(group.samples), sum(s.response_length for s in group.samples)),
                    *(not group.is_finished, max(ends, default=now), now, event, group.group_id),
                ),
            )
            if keep and not group.is_finished:
                self._keep(group, newest, is_finished=True)

    def put_back(self, groups: Sequence[Group]) -> None:
        """Back in the data source, to be handed out again; with --partial-rollout with the tokens they have."""
        with self._write() as event:
            for group in groups:
                self._execute(
                    "UPDATE lives SET stage = 'put_back', num_put_back = num_put_back + 1, changed = ? "
                    "WHERE group_id = ?",
                    (event, group.group_id),
                )
                if group.is_finished:
                    continue  # what is kept of it, stays
                self._execute("DELETE FROM payloads WHERE group_id = ?", (group.group_id,))
                if any(sample.response_length for sample in group.samples):
                    self._keep(group, versions_of(group)[1], is_finished=False)

    def dropped(self, groups: Sequence[Group], reason: str) -> None:
        """Nobody will train on these: filtered, failed, too old, …"""
        with self._write() as event:
            for group in groups:
                self._end(group.group_id, DROPPED, reason, None, event)

    def trained(self, rollout_id: int, groups: Sequence[Group]) -> None:
        """The trainer's weights have learnt from these; that is not saved yet."""
        with self._write() as event:
            for group in groups:
                row = self._row(group.group_id, "stage, rollout_id")
                if row is not None and row[0] == TRAINED:
                    self._note(group.group_id, "doubled", f"trained on in rollouts {row[1]} and {rollout_id}")
                self._end(group.group_id, TRAINED, None, rollout_id, event)

    def saved(self, rollout_id: int, version: PolicyVersion, event: int) -> None:
        """A checkpoint is complete. What had ended when it was made is in it for good, and needs no bytes any more.

        Args:
            version: of its weights.
            event: as `sync` gave it when the checkpoint was begun.
        """
        self._saved_version = version
        with self._write():
            self._execute("INSERT OR REPLACE INTO saves VALUES (?, ?, ?, ?)", (rollout_id, event, time.time(), version))
            # Of what has ended since, only that can be used again which is of versions that the checkpoint knows.
            self._execute(
                "DELETE FROM payloads WHERE group_id IN (SELECT l.group_id FROM payloads p JOIN lives l USING "
                "(group_id) WHERE l.stage IN ('trained', 'dropped') AND (l.changed <= ? OR p.newest > ?))",
                (event, version),
            )

    # Checkpoint and resume --------------------------------------------------------------------------------------------

    def sync(self) -> int:
        """Everything so far is on the disk. Returns: the number of the last event, which a checkpoint names."""
        with self._lock, naming(self.path):
            self._connection.execute("PRAGMA wal_checkpoint(FULL)")
            return self._event

    def rewind(
        self,
        event: int,
        *,
        waiting: Iterable[int],
        unsure: bool,
        version: PolicyVersion,
        why_not: str | None = None,
    ) -> Rewound:
        """Undo what came after a checkpoint's event, so that the run goes on from there.

        Args:
            event: as `sync` gave it then; 0 for a run that begins anew.
            waiting: the groups that the restored data source hands out again, in flight or put back then.
            unsure: the source does not say which of those put back it holds.
            version: of the checkpoint's weights: what newer ones have sampled is of lost versions.
            why_not: why nothing that was kept may be used again, where that is so.
        Returns: what became of the groups.
        """
        self._saved_version = version
        held = set(waiting)
        with self._write() as now:
            again, undone, lost = 0, 0, 0
            for group_id, stage, born, newest in self._execute(
                f"SELECT group_id, stage, born, newest FROM lives WHERE changed > {int(event)} OR stage IN "
                "('taken', 'finished', 'put_back')"
            ).fetchall():
                if stage == LOST:
                    continue
                if group_id in held or (unsure and stage == PUT_BACK and born <= event):
                    became, again = PUT_BACK, again + 1
                elif born > event or stage == UNDONE:
                    became, undone = UNDONE, undone + 1
                else:
                    became, lost = LOST, lost + 1
                    self._note(group_id, "lost", f"was {stage}; the data source that was restored does not hold it")
                self._execute(
                    "UPDATE lives SET stage = ?, reason = NULL, ended_s = NULL, changed = ? WHERE group_id = ?",
                    (became, now, group_id),
                )
                if stage in (*ENDED, FINISHED) and became != LOST and (why_not or (newest or 0) > version):
                    reason = why_not or f"sampled by version {newest}, the checkpoint's is {version}"
                    self._note(group_id, "again", f"was {stage}; {reason}")
            self._execute("UPDATE notes SET what = 'doubled, undone' WHERE what = 'doubled' AND event > ?", (event,))
            self._execute("DELETE FROM saves WHERE event > ?", (event,))
            if why_not is None:
                self._execute("DELETE FROM payloads WHERE newest IS NULL OR newest > ?", (version,))
            else:
                self._execute("DELETE FROM payloads")
            kept = {i: bool(f) for i, f in self._execute("SELECT group_id, is_finished FROM payloads")}
        return Rewound(
            finished=frozenset(i for i, is_finished in kept.items() if is_finished),
            partial=frozenset(i for i, is_finished in kept.items() if not is_finished),
            num_waiting=again,
            num_undone=undone,
            num_lost=lost,
        )

    def kept(self, group_id: int) -> tuple[Group, bool] | None:
        """A group with the responses that were kept of it, and whether it is finished; None where nothing was."""
        with self._lock, naming(self.path):
            row = self._execute("SELECT data, is_finished FROM payloads WHERE group_id = ?", (group_id,)).fetchone()
        return None if row is None else (group_from_bytes(row[0]), bool(row[1]))

    def note(self, group_id: int | None, what: str, detail: str) -> None:
        """Something out of the ordinary; `vime buffer` shows it."""
        with self._write():
            self._note(group_id, what, detail)

    # To look at -------------------------------------------------------------------------------------------------------

    def lives(self, where: str = "", parameters: Sequence[Any] = ()) -> Iterator[Life]:
        """Each group's life, by group_id. Args: where: an SQL condition on the columns that `Life` names."""
        condition = f" WHERE {where}" if where else ""
        with self._lock, naming(self.path):
            cursor = self._connection.cursor()
            for row in cursor.execute(
                f"SELECT {', '.join(COLUMNS)} FROM lives{condition} ORDER BY group_id", parameters
            ):
                yield Life(**dict(zip(COLUMNS, row, strict=True)))

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows of a SELECT; the tables are in vime/data/journal_schema.py."""
        with self._lock, naming(self.path):
            return list(self._execute(sql, parameters))

    def notes(self, group_id: int | None = None) -> list[Note]:
        """Of one group, or all of them, oldest first."""
        condition, parameters = ("WHERE group_id = ? ", [group_id]) if group_id is not None else ("", [])
        rows = self.query(f"SELECT at_s, group_id, what, detail FROM notes {condition}ORDER BY number", parameters)
        return [Note(*row) for row in rows]

    def meta(self) -> dict[str, str]:
        """What is known of the run."""
        return dict(self.query("SELECT key, value FROM meta"))

    def set_meta(self, **values: Any) -> None:
        """Keep something of the run: text as it is, the rest as JSON."""
        with self._write():
            for key, value in values.items():
                text = value if isinstance(value, str) else json.dumps(value)
                self._execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, text))

    # ------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _write(self) -> Iterator[int]:
        """One transaction: all of it is in the file, or none."""
        with self._lock, naming(self.path):
            self._execute("BEGIN IMMEDIATE")
            try:
                event = self._event + 1
                self._execute("INSERT OR REPLACE INTO meta VALUES ('event', ?)", (str(event),))
                self._event = event
                yield event
                self._execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # SQLite itself rolls back when the disk is full
                    self._execute("ROLLBACK")
                raise

    def _last_event(self, meta: Mapping[str, str]) -> int:
        text = meta.get("event", "0")
        if not (isinstance(text, str) and text.isdecimal()):
            self._connection.close()
            raise DataError(f"{self.path}: the journal of the data buffer is damaged: its last event is {text!r}")
        return int(text)

    def _execute(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> Any:
        return self._connection.execute(sql, parameters)

    def _row(self, group_id: int, columns: str) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._execute(
            f"SELECT {columns} FROM lives WHERE group_id = ?", (group_id,)
        ).fetchone()
        return row

    def _note(self, group_id: int | None, what: str, detail: str) -> None:
        self._execute(
            "INSERT INTO notes (event, at_s, group_id, what, detail) VALUES (?, ?, ?, ?, ?)",
            (self._event, time.time(), group_id, what, detail),
        )

    def _end(self, group_id: int, stage: str, reason: str | None, rollout_id: int | None, event: int) -> None:
        self._execute(
            "UPDATE lives SET stage = ?, reason = ?, rollout_id = coalesce(?, rollout_id), ended_s = ?, changed = ? "
            "WHERE group_id = ?",
            (stage, reason, rollout_id, time.time(), event, group_id),
        )
        self._execute("DELETE FROM payloads WHERE group_id = ? AND newest > ?", (group_id, self._saved_version))

    def _keep(self, group: Group, newest: PolicyVersion | None, *, is_finished: bool) -> None:
        """Its bytes, where they could be used again: policy versions must be known for that."""
        if not self._keeps_payloads or newest is None:
            return
        try:
            data = group_to_bytes(group)
        except (TypeError, ValueError, OverflowError) as error:  # a hook's value that JSON cannot hold
            self._note(group.group_id, "unsaved", f"a resume would generate it again: {error}")
            return
        self._execute(
            "INSERT OR REPLACE INTO payloads VALUES (?, ?, ?, ?)", (group.group_id, newest, is_finished, data)
        )
