"""The user's store of tuning records: a folder with one database, for any number of processes of one machine.

One row a slot (a problem on a target) holds every record of that slot: one an environment and measurement
policy. What can't be read is reported in `quarantined` and kept; it is never executed, and never in the way.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from gemmcache.errors import IncompatibleError, IntegrityError, MissingPackageError, UsageError
from gemmcache.problem import Problem
from gemmcache.records import content, database, rows
from gemmcache.records.content import KEPT, NEW, REPLACED
from gemmcache.records.failures import storage_errors
from gemmcache.records.interface import TuningRecord, slot_digest
from gemmcache.target import Target

if TYPE_CHECKING:
    from gemmcache.records.disk import SafeCache

__all__ = ["KEPT", "NEW", "REPLACED", "Changes", "Quarantined", "RecordStore", "is_store"]


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A row that is not used: its number in the database, its key as printable text, and why."""

    rowid: int
    key: str
    reason: str

    def __str__(self) -> str:
        return f"row {self.rowid} ({self.key[:24]}): {self.reason}"


@dataclass(frozen=True, slots=True)
class Changes:
    """What became of records that were put, by digest."""

    new: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def is_store(folder: Path) -> bool:
    """Whether there is a records database in `folder`. Nothing is opened."""
    return os.path.lexists(folder / database.DATABASE)


class RecordStore:
    """The records in `folder`, a context manager; created on entering unless `read_only`.

    Several processes and threads may use one folder at once, on a local file system (not NFS). `timeout` is
    how many seconds to wait for another writer. Reading alone needs no diskcache and no write permission.

    Entering raises `StorageError` where the folder can't be used, `IntegrityError` for a database that is not
    one of records, `MissingPackageError` without diskcache, `UsageError` for an unusable folder name. So may
    every method, and `UsageError` on a store that is not open.
    """

    def __init__(self, folder: str | os.PathLike[str], *, read_only: bool = False, timeout: float = 30.0) -> None:
        self.folder = Path(folder).absolute()
        self.read_only = read_only
        self.timeout = timeout
        self._found: dict[int, Quarantined] = {}
        self._cache: SafeCache | None = None
        self._reader: sqlite3.Connection | None = None
        self._reader_pid = 0

    def __enter__(self) -> RecordStore:
        with storage_errors(self.folder, "opening the records"):
            if self.read_only:
                self._open_reader()
            else:
                self._cache = self._open_cache()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes this thread's connection; may be called twice."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _open_cache(self) -> SafeCache:
        try:
            from gemmcache.records.disk import open_cache
        except ModuleNotFoundError as error:
            if error.name != "diskcache":
                raise
            raise MissingPackageError(
                "writing tuning records needs the package diskcache",
                remedy="pip install 'gemmcache[records]'",
            ) from error
        database.check_path(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        return open_cache(self.folder, self.timeout)

    def _open_reader(self) -> sqlite3.Connection:
        self._reader = database.connect_read_only(self.folder, self.timeout)
        self._reader_pid = os.getpid()
        return self._reader

    def _connection(self) -> sqlite3.Connection:
        if self._cache is not None:
            return self._cache.connection
        if self._reader is None:
            raise UsageError(f"the records in {self.folder} are not open", remedy="use the store in a with statement")
        # SQLite connections must not be carried across a fork.
        return self._reader if self._reader_pid == os.getpid() else self._open_reader()

    @property
    def quarantined(self) -> tuple[Quarantined, ...]:
        """The bad rows that this object has come across so far (`all` comes across each one)."""
        return tuple(self._found.values())

    def _decode(self, row: rows.Row) -> tuple[TuningRecord, ...]:
        """A row's records; none of a bad row, which is noted."""
        reason = row.reason
        if row.value is not None:
            try:
                return content.decode_row(row.key, row.value)
            except (IntegrityError, IncompatibleError) as error:
                reason = str(error)
        self._found[row.rowid] = Quarantined(row.rowid, row.key, reason)
        return ()

    def get(self, problem: Problem, target: Target) -> tuple[TuningRecord, ...]:
        """The records of `problem` on `target` (this very product) of any driver and policy, newest first."""
        with storage_errors(self.folder, "reading a record"):
            row = rows.find(self._connection(), slot_digest(problem, target))
            return () if row is None else content.newest_first(self._decode(row))

    def all(self) -> tuple[TuningRecord, ...]:
        """Every record, as of one moment: slots in the order of insertion, newest first within a slot."""
        with storage_errors(self.folder, "reading the records"):
            slots = [content.newest_first(self._decode(row)) for row in rows.scan(self._connection())]
        return tuple(record for records in slots for record in records)

    def put(self, record: TuningRecord) -> str:
        """Stores `record`, and says what became of it: `new`, `replaced` (an older one of the same digest),
        or `kept` (the stored one is as new, and stays). On return it is on the disk."""
        changes = self.put_many([record])
        return NEW if changes.new else REPLACED if changes.replaced else KEPT

    def put_many(self, records: Iterable[TuningRecord]) -> Changes:
        """Stores all of `records` or, where that fails, none."""
        slots: dict[str, list[TuningRecord]] = {}
        for record in records:
            slots.setdefault(record.slot, []).append(record)
        outcomes: dict[str, list[str]] = {NEW: [], REPLACED: [], KEPT: []}
        with self._writing("storing records") as cache:
            for slot, added in slots.items():
                stored = self._stored(cache, slot)
                changed = False
                for record in added:
                    outcome = content.absorb(stored, record)
                    outcomes[outcome].append(record.digest)
                    changed = changed or outcome != KEPT
                if changed:
                    cache.set(slot, content.encode_row(stored.values()))
        return Changes(*(tuple(outcomes[o]) for o in (NEW, REPLACED, KEPT)))

    def remove(self, *digests: str) -> tuple[str, ...]:
        """Removes the records of these digests, all in one transaction; returns those that were there."""
        wanted, removed = set(digests), []
        with self._writing("removing records") as cache:
            for row in list(rows.scan(cache.connection)):
                stored = {r.digest: r for r in self._decode(row)}
                gone = wanted & stored.keys()
                if not gone:
                    continue
                removed += sorted(gone)
                rest = [r for digest, r in stored.items() if digest not in gone]
                if rest:
                    cache.set(row.key, content.encode_row(rest))
                else:
                    rows.delete(cache.connection, row)
        return tuple(removed)

    def _stored(self, cache: SafeCache, slot: str) -> dict[str, TuningRecord]:
        """A slot's records by digest, within a write. A bad row is moved aside, so as not to be lost."""
        row = rows.find(cache.connection, slot)
        if row is None:
            return {}
        if row.value is not None:
            try:
                return {r.digest: r for r in content.decode_row(slot, row.value)}
            except IntegrityError:
                pass  # noted by `_decode` below
        self._decode(row)
        rows.set_aside(cache.connection, row)
        return {}

    @contextmanager
    def _writing(self, doing: str) -> Iterator[SafeCache]:
        """One transaction, rolled back if the block raises."""
        if self._cache is None:
            if self._reader is not None:
                raise UsageError(f"the records in {self.folder} were opened for reading only")
            self._connection()
            raise UsageError(f"the records in {self.folder} are not open")
        cache = self._cache
        with storage_errors(self.folder, doing):
            try:
                with cache.transact():
                    yield cache
            finally:
                # A COMMIT that fails (disk full) leaves its transaction open, and with it the lock.
                if cache.connection.in_transaction:
                    cache.connection.execute("ROLLBACK")
