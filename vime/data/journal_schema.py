"""The journal's file: its tables, how it is opened, and what is said when it cannot be written or read."""

from __future__ import annotations

import errno
import itertools
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from vime.errors import DataError

FILE = "journal.sqlite"
FORMAT = 1
_FULL_BYTES = 16 << 20  # less space than this is none
_WAL_PAGES = 8192  # 32 MiB of the log before it is moved into the file, which waits for the disk

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE lives (
    group_id INTEGER PRIMARY KEY,
    epoch INTEGER, idx INTEGER,
    stage TEXT NOT NULL, reason TEXT, rollout_id INTEGER,
    oldest INTEGER, newest INTEGER, num_samples INTEGER NOT NULL, num_tokens INTEGER,
    num_taken INTEGER NOT NULL, num_finished INTEGER NOT NULL, num_put_back INTEGER NOT NULL,
    taken_s REAL NOT NULL, generated_s REAL, finished_s REAL, ended_s REAL,
    born INTEGER NOT NULL, changed INTEGER NOT NULL
);
CREATE TABLE payloads (group_id INTEGER PRIMARY KEY, newest INTEGER, is_finished INTEGER NOT NULL, data BLOB NOT NULL);
CREATE TABLE notes (
    number INTEGER PRIMARY KEY, event INTEGER NOT NULL, at_s REAL NOT NULL, group_id INTEGER, what TEXT NOT NULL,
    detail TEXT
);
CREATE INDEX notes_of_group ON notes (group_id);
CREATE TABLE saves (rollout_id INTEGER PRIMARY KEY, event INTEGER NOT NULL, at_s REAL NOT NULL, version INTEGER);
"""


def open_to_write(path: Path) -> sqlite3.Connection:
    """A connection for the run, whatever thread calls; the tables are made where the file is new.

    Raises: DataError if there is something else under this name, or the journal is damaged; OSError if it cannot be
        written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path):
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA page_size=16384")  # groups are large; of a new file alone
            connection.execute("PRAGMA journal_mode=WAL")
            # A killed process loses nothing by this; what a power failure takes was not in a checkpoint: see `sync`.
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute(f"PRAGMA wal_autocheckpoint={_WAL_PAGES}")
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
                connection.executescript(f"BEGIN; {TABLES}; INSERT INTO meta VALUES ('format', '{FORMAT}'); COMMIT;")
            _check(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


def open_to_read(path: Path) -> sqlite3.Connection:
    """A connection beside a run that writes, or of one that has ended. Raises: DataError."""
    if not path.is_file():
        raise DataError(f"{path} is not there")
    with naming(path):
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None)
        try:
            _check(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


def _check(connection: sqlite3.Connection, path: Path) -> None:
    (found,) = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone() or ("none",)
    if found != str(FORMAT):
        raise DataError(f"{path} is a journal of format {found}; this vime reads {FORMAT}")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in whatever SQLite raises. Raises: OSError if it cannot be written; DataError if it is damaged."""
    try:
        yield
    except sqlite3.OperationalError as error:
        text = str(error)
        if "full" in text or "disk I/O" in text or "readonly" in text or "unable to open" in text:
            number = errno.ENOSPC if "full" in text or _is_full(path.parent) else errno.EIO
            what = "the disk is full" if number == errno.ENOSPC else text
            raise OSError(number, f"the journal of the data buffer cannot be written: {what}", str(path)) from error
        raise DataError(f"{path}: the journal of the data buffer cannot be used: {error}") from error
    except sqlite3.Error as error:
        raise DataError(f"{path}: the journal of the data buffer is damaged: {error}") from error


def _is_full(folder: Path) -> bool:
    return os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize < _FULL_BYTES


def copy_journal(path: Path, to: Path) -> None:
    """Copy a journal, whoever has it open; `to` is whole or not there. Raises: OSError, DataError."""
    to.parent.mkdir(parents=True, exist_ok=True)
    partial = to.with_name(f".{to.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        with naming(partial), closing(open_to_read(path)) as source, closing(sqlite3.connect(partial)) as target:
            source.backup(target)
        partial.replace(to)
    finally:
        partial.unlink(missing_ok=True)


def set_aside(path: Path, why: str) -> Path:
    """Give a journal another name, its log included. Args: why: "damaged". Returns: the new path."""
    for k in itertools.count():
        aside = path.with_name(f"{why}_{path.name}" if not k else f"{why}_{k}_{path.name}")
        if not aside.exists():
            break
    for end in ("", "-wal", "-shm"):
        part = path.with_name(path.name + end)
        if part.exists():
            part.rename(aside.with_name(aside.name + end))
    return aside
