"""Rows of the records database as they are, whoever wrote them: read without trust in any column."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

from gemmcache import codec

#: diskcache's mode of a value that is stored in the row itself.
RAW = 1

#: The most bytes that one row's value may have.
MAX_VALUE_BYTES = 16 << 20

#: Keys of rows that were moved out of the way of a new value begin so; rowid and the old key follow.
ASIDE = "quarantine:"

# Text goes through CAST, since sqlite3 raises for the whole statement where a text is not UTF-8; lengths are
# bounded here, so that a forged row can't make the reader allocate.
_COLUMNS = (
    "rowid, typeof(key), substr(CAST(key AS BLOB), 1, 200), raw IS 1 AND typeof(raw) = 'integer',"
    " mode IS 1 AND typeof(mode) = 'integer', filename IS NULL, typeof(value), length(CAST(value AS BLOB)),"
    f" CASE WHEN typeof(value) = 'blob' AND length(value) <= {MAX_VALUE_BYTES} THEN value END"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One row: `key` is a slot's digest and `value` its bytes where `reason` is empty.

    Else `reason` says what is wrong with the row, `key` is printable text, and `value` is None.
    """

    rowid: int
    key: str
    value: bytes | None
    reason: str = ""


def _row(columns: tuple[object, ...]) -> Row:
    rowid, key_type, key_bytes, raw, mode, no_file, value_type, size, value = columns
    if not isinstance(rowid, int):
        raise TypeError("a rowid is an integer")
    key = key_bytes.decode("utf-8", "backslashreplace") if isinstance(key_bytes, bytes) else "NULL"
    reason = ""
    if key.startswith(ASIDE):
        reason = "set aside when its slot was written anew"
    elif not raw:
        reason = "its key is marked as pickled"
    elif key_type != "text" or not codec.is_digest(key):
        reason = f"its key ({key_type}) is not a digest"
    elif not no_file:
        reason = "it names a file"
    elif not mode:
        reason = "its mode is not that of raw bytes"
    elif value_type != "blob":
        reason = f"its value is of type {value_type}, not bytes"
    elif not isinstance(value, bytes):
        reason = f"its value has {size} bytes, more than the {MAX_VALUE_BYTES} allowed"
    if reason:
        return Row(rowid, key.encode("unicode_escape").decode("ascii"), None, reason)
    return Row(rowid, key, value if isinstance(value, bytes) else None)


def scan(connection: sqlite3.Connection) -> Iterator[Row]:
    """Every row, in the order of insertion, as of one moment."""
    if _has_table(connection):
        for columns in connection.execute(f"SELECT {_COLUMNS} FROM Cache ORDER BY rowid"):
            yield _row(columns)


def find(connection: sqlite3.Connection, slot: str) -> Row | None:
    """The row of a slot, expired or not (nothing here ever expires); None if there is none."""
    if not _has_table(connection):
        return None
    query = f"SELECT {_COLUMNS} FROM Cache WHERE key = ? AND raw = 1"
    columns = connection.execute(query, (slot,)).fetchone()
    return None if columns is None else _row(columns)


def _has_table(connection: sqlite3.Connection) -> bool:
    """False for a reader of a database that another process is creating, or was killed while creating."""
    return connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'Cache'").fetchone() is not None


def set_aside(connection: sqlite3.Connection, row: Row) -> None:
    """Moves a bad row off its slot's key, all else unchanged, so that a new value does not overwrite it.

    The row keeps its rowid, which no other row has, so the new key is free.
    """
    connection.execute("UPDATE Cache SET key = ? || rowid || ':' || key WHERE rowid = ?", (ASIDE, row.rowid))


def delete(connection: sqlite3.Connection, row: Row) -> None:
    """Deletes a row, and nothing that it may name."""
    connection.execute("DELETE FROM Cache WHERE rowid = ?", (row.rowid,))
