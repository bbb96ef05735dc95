"""What went wrong in SQLite or the file system, as typed errors with a remedy."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gemmcache.errors import GemmcacheError, IntegrityError, StorageError

#: Part of SQLite's message -> what to do.
_REMEDIES = (
    ("is full", "free space on that file system; nothing of this write was kept"),
    ("locked", "another process holds the records; try again when it is done"),
    ("readonly", "make the folder writable, or name another with --records"),
    ("unable to open", "check that the folder exists and is writable, or name another with --records"),
    ("disk i/o", "check the file system and its free space"),
)
_BROKEN = ("malformed", "not a database", "no such table", "no such column", "constraint failed")


@contextmanager
def storage_errors(folder: Path, doing: str) -> Iterator[None]:
    """Turns errors of SQLite, diskcache and the file system inside the block into `StorageError`, or into
    `IntegrityError` where the database itself is damaged."""
    try:
        yield
    except GemmcacheError:
        raise
    except OSError as error:
        raise StorageError(
            f"{folder}: {doing} failed: {error}", remedy="check the folder, or name another with --records"
        ) from error
    except Exception as error:
        cause = _sqlite_cause(error)
        if cause is None:
            raise
        text = str(cause)
        if any(part in text for part in _BROKEN):
            raise IntegrityError(
                f"{folder}: {doing} failed, the records database is damaged: {text}",
                remedy="move the folder away and import the records from an export",
            ) from error
        remedy = next((r for part, r in _REMEDIES if part in text.lower()), "check the file system")
        raise StorageError(f"{folder}: {doing} failed: {text}", remedy=remedy) from error


def _sqlite_cause(error: BaseException) -> sqlite3.Error | None:
    """The first SQLite error behind `error`: diskcache hides it behind its Timeout or a failed ROLLBACK."""
    found: sqlite3.Error | None = None
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        if isinstance(at, sqlite3.Error):
            found = at
        at = at.__cause__ or at.__context__
    return found
