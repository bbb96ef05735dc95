"""The user's records on top of those that are shipped with gemmcache."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType

from gemmcache.environment import Environment
from gemmcache.errors import StorageError
from gemmcache.paths import records_dir
from gemmcache.problem import Problem
from gemmcache.records.content import newest_first
from gemmcache.records.interchange import read_jsonl
from gemmcache.records.interface import TuningRecord, slot_digest
from gemmcache.records.store import Changes, Quarantined, RecordStore, is_store
from gemmcache.target import Target

USER, SHIPPED = "user", "shipped"


def shipped_records_dir() -> Path | None:
    """The folder of shipped records: `_shipped/records` in an installed package, `artifacts/records` in a
    source checkout; None where there is neither."""
    package = Path(__file__).resolve().parents[1]
    candidates = [package / "_shipped" / "records"]
    if (package.parent / "pyproject.toml").is_file():
        candidates.append(package.parent / "artifacts" / "records")
    return next((folder for folder in candidates if folder.is_dir()), None)


@dataclass(frozen=True, slots=True)
class Shipped:
    """Read-only records by slot, newest first in each."""

    slots: dict[str, tuple[TuningRecord, ...]]

    def all(self) -> tuple[TuningRecord, ...]:
        return tuple(r for records in self.slots.values() for r in records)


def record_files(folder: Path) -> list[Path]:
    """Every `.jsonl` file below `folder`, sorted. Raises `StorageError` if it can't be listed."""
    try:
        return sorted(path for path in folder.rglob("*.jsonl") if path.is_file())
    except OSError as error:
        raise StorageError(f"{folder} can't be listed: {error}", remedy="check the folder") from error


def read_folder(folder: Path) -> Shipped:
    """The records of every `.jsonl` file below `folder`; the files are read again only when one has changed.

    Of two records with one digest the newer counts. Raises as `read_jsonl` does.
    """
    files = record_files(folder)
    try:
        stamps = tuple((str(f), s.st_mtime_ns, s.st_size, s.st_ino) for f in files for s in [f.stat()])
    except OSError as error:
        raise StorageError(f"{folder} can't be read: {error}", remedy="check the folder") from error
    return _read_files(stamps)


@lru_cache(maxsize=4)
def _read_files(stamps: tuple[tuple[str, int, int, int], ...]) -> Shipped:
    slots: dict[str, dict[str, TuningRecord]] = {}
    for name, *_ in stamps:
        for record in read_jsonl(Path(name)):
            of_slot = slots.setdefault(record.slot, {})
            digest = record.digest
            known = of_slot.get(digest)
            of_slot[digest] = record if known is None else newest_first([known, record])[0]
    return Shipped({slot: newest_first(records.values()) for slot, records in slots.items()})


@dataclass(frozen=True, slots=True)
class Layered:
    """A record and the layer that it is in: `user` or `shipped`."""

    record: TuningRecord
    layer: str


class Records:
    """Both layers: look-ups prefer the user's own records, changes go to them. A context manager.

    Without a user's folder nothing of the user's layer is opened or imported; the first `put` creates it.
    Records of kernel families that are not installed are returned like any other.
    """

    def __init__(self, folder: Path, shipped: Path | None, read_only: bool) -> None:
        self.folder = folder
        self.read_only = read_only
        self._shipped_folder = shipped
        self._store: RecordStore | None = None

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str] | None = None,
        shipped: bool | str | os.PathLike[str] = True,
        read_only: bool = False,
    ) -> Records:
        """The records in `folder` (`paths.records_dir()` if not given) on top of the shipped ones.

        `shipped` may name another folder of record files, or be False for none. With `read_only` the user's
        database is only read, which needs neither diskcache nor write permission.
        """
        base = shipped_records_dir() if shipped is True else None if shipped is False else Path(shipped).absolute()
        return cls(Path(folder).absolute() if folder is not None else records_dir(), base, read_only)

    def __enter__(self) -> Records:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the user's database; the next use opens it again."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _user(self, create: bool = False) -> RecordStore | None:
        """The user's store, opened when first needed; None where there is none and none is to be made."""
        if self._store is None and (create or is_store(self.folder)):
            self._store = RecordStore(self.folder, read_only=self.read_only).__enter__()
        return self._store

    def _writable(self) -> RecordStore:
        store = self._user(create=not self.read_only)
        if store is None:
            raise StorageError(f"{self.folder} holds no records and was opened for reading only")
        return store

    def _shipped(self) -> Shipped:
        return Shipped({}) if self._shipped_folder is None else read_folder(self._shipped_folder)

    def find(self, problem: Problem, target: Target, environment: Environment | None = None) -> Layered | None:
        """`lookup`, with the layer of the record."""
        user = self._user()
        for layer, records in (
            (USER, user.get(problem, target) if user else ()),
            (SHIPPED, self._shipped().slots.get(slot_digest(problem, target), ())),
        ):
            if records:
                same = (r for r in records if r.environment == environment)
                return Layered(next(same, records[0]), layer)
        return None

    def lookup(self, problem: Problem, target: Target, environment: Environment | None = None) -> TuningRecord | None:
        """The record to use for `problem` on `target`, None if there is none.

        Only records of the same arch, SM count and product count: another product's winner is never served.
        The user's layer goes first; within a layer the newest of this very `environment`, else the newest.
        """
        found = self.find(problem, target, environment)
        return found.record if found else None

    def all(self) -> tuple[Layered, ...]:
        """Every record of both layers, the user's first; of one digest in both only the user's."""
        user = self._user()
        own = user.all() if user else ()
        hidden = {r.digest for r in own}
        below = (r for r in self._shipped().all() if r.digest not in hidden)
        return (*(Layered(r, USER) for r in own), *(Layered(r, SHIPPED) for r in below))

    def on_siblings(self, target: Target) -> tuple[TuningRecord, ...]:
        """Every record of both layers that was measured on `target`'s product or one of the same arch and SM count,
        the user's first."""
        return tuple(f.record for f in self.all() if f.record.environment.target.is_sibling(target))

    def hides_newer(self, records: Iterable[TuningRecord]) -> int:
        """How many of `records`, if they are the user's, go before shipped records that are newer."""
        slots = self._shipped().slots
        return sum(any(s.measured_at > r.measured_at for s in slots.get(r.slot, ())) for r in records)

    def put(self, record: TuningRecord) -> str:
        """`RecordStore.put` on the user's layer."""
        return self._writable().put(record)

    def put_many(self, records: Iterable[TuningRecord]) -> Changes:
        """`RecordStore.put_many` on the user's layer."""
        return self._writable().put_many(records)

    def remove(self, *digests: str) -> tuple[str, ...]:
        """`RecordStore.remove` on the user's layer; shipped records can't be removed."""
        return self._writable().remove(*digests) if self._user() else ()

    @property
    def quarantined(self) -> tuple[Quarantined, ...]:
        """Bad rows of the user's database that this object has come across."""
        return self._store.quarantined if self._store is not None else ()
