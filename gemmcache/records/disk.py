"""A diskcache that holds digests and bytes inside SQLite, and nothing else.

diskcache's own disks unpickle any row that says it is a pickle, and open or delete any file that a row
names. This one has no pickles and no files at all, so that a row that claims either is only data.
Imported by the store when a folder is opened for writing; needs the package diskcache.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import diskcache

from gemmcache import codec
from gemmcache.errors import IntegrityError, UsageError
from gemmcache.records import database
from gemmcache.records.rows import MAX_VALUE_BYTES, RAW


class SafeDisk(diskcache.Disk):  # type: ignore[misc]
    """Keys are sha256 digests in hex; values are bytes, stored raw in the row.

    Raises `UsageError` for anything else to be written, `IntegrityError` for any row that is otherwise.
    """

    def __init__(self, directory: str, **_settings: Any) -> None:
        # `_settings` come from the database, where anyone may have written them; none is of use here.
        super().__init__(directory)

    def put(self, key: object) -> tuple[str, bool]:
        """The row's key and its `raw` flag for `key`, a digest."""
        if not codec.is_digest(key):
            raise UsageError("a records key must be a sha256 digest in hex")
        return str(key), True

    def get(self, key: object, raw: object) -> str:
        """The key of a row; a pickled or foreign one is refused unread."""
        if raw not in (1, True) or not codec.is_digest(key):
            raise IntegrityError("a row of the records has a key that is not a digest")
        return str(key)

    def store(self, value: object, read: bool, key: object = None) -> tuple[int, int, None, memoryview]:
        """The columns size, mode, filename and value for `value`, bytes."""
        if read or not isinstance(value, bytes):
            raise UsageError("a records value must be bytes")
        if len(value) > MAX_VALUE_BYTES:
            raise UsageError(f"a records value has {len(value)} bytes, more than the {MAX_VALUE_BYTES} allowed")
        return 0, RAW, None, sqlite3.Binary(value)

    def fetch(self, mode: object, filename: object, value: object, read: bool) -> bytes:
        """The value of a row; one that names a file or another mode is refused unread."""
        if read or mode != RAW or filename is not None or not isinstance(value, bytes):
            raise IntegrityError("a row of the records is not raw bytes")
        return value

    def filename(self, key: object = None, value: object = None) -> tuple[str, str]:
        """Never given: values don't go to files."""
        raise UsageError("records are not stored in files")

    def remove(self, file_path: object) -> None:
        """Does nothing: no file is this disk's own, so any name comes from a forged row."""


class SafeCache(diskcache.Cache):  # type: ignore[misc]
    """A `diskcache.Cache` on `SafeDisk`, with the connection of the calling thread and process."""

    @property
    def connection(self) -> sqlite3.Connection:
        """SQLite connection, opened anew after a fork. Python code must not close it."""
        connection: sqlite3.Connection = self._con
        return connection


def open_cache(folder: Path, timeout: float) -> SafeCache:
    """The cache in `folder`, an existing absolute path; waits `timeout` seconds for locks.

    Schema and settings are examined before diskcache sees them, and settings again afterwards. Raises
    `IntegrityError` for a database that diskcache did not lay out, and whatever SQLite raises.
    """
    database.prepare(folder, timeout)
    cache = SafeCache(str(folder), timeout=timeout, disk=SafeDisk, **database.SETTINGS)
    try:
        wrong = database.unlike_required(cache.connection)
        if wrong:
            raise IntegrityError(
                f"{folder}: settings {', '.join(wrong)} changed while the records were being opened",
                remedy="let only gemmcache open this folder",
            )
    except BaseException:
        cache.close()
        raise
    return cache
