"""The SQLite file under the records: examined before diskcache opens it.

diskcache obeys the settings table of whatever file it opens (they become pragmas, constructor arguments and
attributes), and SQLite runs whatever triggers the schema holds. Both are checked here with plain SQL first.
"""

from __future__ import annotations

import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from gemmcache.errors import IntegrityError, UsageError

DATABASE = "cache.db"

#: What diskcache must run with: nothing evicted, no values in files, no memory mapping, commits synced.
SETTINGS: dict[str, int | str] = {
    "statistics": 0,
    "tag_index": 0,
    "eviction_policy": "none",
    "size_limit": 1 << 40,
    "cull_limit": 0,
    "sqlite_auto_vacuum": 1,
    "sqlite_cache_size": 2048,
    "sqlite_journal_mode": "wal",
    "sqlite_mmap_size": 0,
    "sqlite_synchronous": 2,
    # For other openers of the folder: their large values stay in the database as well.
    "disk_min_file_size": (1 << 31) - 1,
    "disk_pickle_protocol": 0,
}
_REMEDY = "move the folder away and import the records from an export"
_SMALLEST = 512
_COUNTERS = ("count", "size", "hits", "misses")

_TABLES = {
    "Settings": re.compile(r"CREATE TABLE Settings \( key TEXT NOT NULL UNIQUE, value\)"),
    # Plain columns of a plain type, with at most an integer default.
    "Cache": re.compile(r"CREATE TABLE Cache \( ?\w+ \w+( PRIMARY KEY)?(, \w+ [A-Z]+( DEFAULT \d+)?)*\)"),
}
_COLUMNS = [
    *("rowid", "key", "raw", "store_time", "expire_time", "access_time", "access_count"),
    *("tag", "size", "mode", "filename", "value"),
]
# The one index that must be unique is spelled out; those of other eviction policies do no harm.
_INDEX = re.compile(
    r"CREATE UNIQUE INDEX Cache_key_raw ON Cache\(key, raw\)"
    r"|CREATE INDEX (?!Cache_key_raw\b)\w+ ON Cache ?\(\w+(, ?\w+)*\)"
)
_TRIGGER = re.compile(
    r"CREATE TRIGGER Settings_\w+ AFTER (INSERT|UPDATE|DELETE) ON Cache FOR EACH ROW BEGIN UPDATE Settings"
    r" SET value = value( [+-] (1|NEW\.size|OLD\.size))+ WHERE key = \"(count|size)\"; END"
)


def connect(folder: Path, timeout: float, mode: str) -> sqlite3.Connection:
    """A connection to the database that is in `folder`; `mode` is `rw`, `ro`, or `immutable` (no writers)."""
    flags = "mode=ro&immutable=1" if mode == "immutable" else f"mode={mode}"
    uri = f"file:{quote(str(folder / DATABASE))}?{flags}"
    connection = sqlite3.connect(uri, uri=True, timeout=timeout, isolation_level=None, check_same_thread=False)
    # Functions that a hostile schema calls from triggers, views or defaults are not run.
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


def connect_read_only(folder: Path, timeout: float) -> sqlite3.Connection:
    """A connection that stores nothing; also works on read-only media, where no writer can be.

    Raises `IntegrityError` for a schema that is not diskcache's.
    """
    check_path(folder)
    try:
        return _checked(folder, timeout, "ro")
    except sqlite3.OperationalError:
        if os.access(folder, os.W_OK):
            # A process that was killed while creating the database left a journal, which only a writer rolls back.
            if not (folder / f"{DATABASE}-journal").exists():
                raise
            _checked(folder, timeout, "rw").close()
            return _checked(folder, timeout, "ro")
        # The write-ahead index can't be created beside the file; without pending writes none is needed.
        pending = (folder / f"{DATABASE}{suffix}" for suffix in ("-wal", "-journal"))
        if any(file.exists() and file.stat().st_size for file in pending):
            raise
        return _checked(folder, timeout, "immutable")


def _checked(folder: Path, timeout: float, mode: str) -> sqlite3.Connection:
    connection = connect(folder, timeout, mode)
    try:
        check_schema(connection, folder)
    except BaseException:
        connection.close()
        raise
    return connection


def check_path(folder: Path) -> None:
    """Refuses a folder that diskcache would take for another, and a file that is a link or no database."""
    text = str(folder)
    if os.path.expandvars(os.path.expanduser(text)) != text:
        raise UsageError(f"records folder '{text}' holds '~' or '$', which would be expanded", remedy="rename it")
    file = folder / DATABASE
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise IntegrityError(f"{file} is not a regular file", remedy="link the folder instead of the file")
    try:
        with file.open("rb") as opened:
            head = opened.read(_SMALLEST)
    except FileNotFoundError:
        return
    # SQLite takes a file shorter than its smallest page for a new database, and writes over it.
    if head and (len(head) < _SMALLEST or not head.startswith(b"SQLite format 3\0")):
        raise IntegrityError(f"{file} is not a database", remedy=_REMEDY)


def prepare(folder: Path, timeout: float) -> None:
    """Checks the schema of the database in `folder` and puts its settings right, if there is one.

    Raises `IntegrityError` for tables, triggers or views that diskcache does not make.
    """
    check_path(folder)
    if not (folder / DATABASE).exists():
        return
    with closing(connect(folder, timeout, "rw")) as connection:
        check_schema(connection, folder)
        if not _has_settings(connection) or not unlike_required(connection):
            return
        connection.execute("BEGIN IMMEDIATE")
        for rowid in [r for r, name, _ in _settings(connection) if name not in SETTINGS and name not in _COUNTERS]:
            connection.execute("DELETE FROM Settings WHERE rowid = ?", (rowid,))
        connection.executemany("INSERT OR REPLACE INTO Settings VALUES (?, ?)", SETTINGS.items())
        connection.execute("COMMIT")


def check_schema(connection: sqlite3.Connection, folder: Path) -> None:
    """Raises `IntegrityError` unless all that the database defines is of the form that diskcache gives it."""
    try:
        objects = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    except sqlite3.OperationalError as error:
        if "decode" not in str(error):
            raise
        objects = [("text", "that is not UTF-8", "")]
    for kind, name, sql in objects:
        known = {"table": _TABLES.get(name), "index": _INDEX, "trigger": _TRIGGER}.get(kind)
        # Indices that SQLite makes for UNIQUE have no text.
        automatic = kind == "index" and sql is None and str(name).startswith("sqlite_autoindex_Settings")
        if not automatic and (known is None or not isinstance(sql, str) or not known.fullmatch(sql)):
            raise IntegrityError(
                f"{folder / DATABASE} holds the {kind} {name!r}, which the records don't have",
                remedy=_REMEDY,
            )
    if any(name == "Cache" for _, name, _ in objects):
        found = [row[1] for row in connection.execute("PRAGMA table_xinfo(Cache)")]
        if found != _COLUMNS:
            raise IntegrityError(
                f"{folder / DATABASE}: table 'Cache' has the columns {', '.join(found)}",
                remedy=_REMEDY,
            )


def _has_settings(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'Settings'").fetchone() is not None


def _settings(connection: sqlite3.Connection) -> list[tuple[int, str, object]]:
    """(rowid, name, value) of every setting; names and texts that are not UTF-8 are shown escaped."""
    rows = connection.execute(
        "SELECT rowid, typeof(key), substr(CAST(key AS BLOB), 1, 64),"
        " typeof(value), substr(CAST(value AS BLOB), 1, 64) FROM Settings"
    ).fetchall()
    shown: list[tuple[int, str, object]] = []
    for rowid, key_kind, key, kind, value in rows:
        name = key.decode("utf-8", "backslashreplace")
        text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else ""
        number = kind == "integer" and text.removeprefix("-").isdigit()
        shown.append((rowid, name if key_kind == "text" else f"{key_kind} {name}", int(text) if number else text))
    return shown


def unlike_required(connection: sqlite3.Connection) -> list[str]:
    """Names of settings that are missing, different from `SETTINGS`, or unknown, in name order."""
    found = {name: value for _, name, value in _settings(connection)}
    wrong = {name for name in found if name not in SETTINGS and name not in _COUNTERS}
    return sorted(wrong | {name for name, value in SETTINGS.items() if found.get(name) != value})
