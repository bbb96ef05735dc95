"""Forged rows, settings and schemas in the records database: never executed, never followed, never lost."""

from __future__ import annotations

import os
import pickle
import random
import sqlite3
from pathlib import Path

import diskcache
import pytest

from gemmcache import codec
from gemmcache.environment import Environment, Toolchain
from gemmcache.errors import IncompatibleError, IntegrityError, UsageError
from gemmcache.problem import ProblemFamily
from gemmcache.records import database
from gemmcache.records.disk import SafeCache, SafeDisk
from gemmcache.records.interface import LIBRARY, MeasurementPolicy, TuningRecord
from gemmcache.records.store import NEW, RecordStore
from gemmcache.target import TARGETS


class Payload:
    """Unpickling this writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, (f"echo executed > {self.path}",))


def a_record(m: int = 16, driver: str = "580.1") -> TuningRecord:
    environment = Environment(TARGETS["h200"], Toolchain(), driver=driver)
    problem = ProblemFamily.of(4096, 4096).at(m)
    times = (10.0, 11.0)
    return TuningRecord(problem, environment, MeasurementPolicy(), LIBRARY, (), "mm", times, "2026-12-01T12:00:00Z")


RECORD = a_record()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with one good record of another slot."""
    folder = tmp_path / "records"
    with RecordStore(folder) as store:
        store.put(a_record(m=1))
    return folder


def plant(folder: Path, **columns: object) -> int:
    """Inserts a row (over an existing one of its key), `key` as RECORD's slot unless given; returns its rowid."""
    row = {"key": RECORD.slot, "raw": 1, "store_time": 0.0, "mode": 1, "size": 0, **columns}
    connection = sqlite3.connect(folder / "cache.db", isolation_level=None)
    try:
        names = ", ".join(row)
        marks = ", ".join("?" * len(row))
        cursor = connection.execute(f"INSERT OR REPLACE INTO Cache ({names}) VALUES ({marks})", tuple(row.values()))
        return int(cursor.lastrowid or 0)
    finally:
        connection.close()


def raw_rows(folder: Path) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(folder / "cache.db")
    connection.text_factory = bytes
    try:
        columns = "rowid, key, raw, mode, filename, value"
        return connection.execute(f"SELECT {columns} FROM Cache ORDER BY rowid").fetchall()
    finally:
        connection.close()


def forged_rows(outside: Path, marker: Path) -> dict[str, dict[str, object]]:
    """Rows of every kind that a stock diskcache would execute, open, delete or trip over."""
    bomb = pickle.dumps(Payload(marker))
    bomb_file = outside / "bomb.pickle"
    bomb_file.write_bytes(bomb)
    valid = codec.encode({"format": 1, "records": [RECORD.to_value()]}, floats=True)
    rows: dict[str, dict[str, object]] = {
        f"mode {mode}": {"mode": mode, "value": bomb} for mode in (0, 2, 3, 4, 5, -1, None, "4", 1.5, b"\x04")
    }
    rows |= {
        f"mode {mode} file": {"mode": mode, "filename": str(bomb_file), "size": len(bomb)} for mode in (1, 2, 3, 4)
    }
    rows |= {
        "value and absolute file": {"value": valid, "filename": str(bomb_file)},
        "relative file": {"value": valid, "filename": "../outside/bomb.pickle"},
        "empty file name": {"value": valid, "filename": ""},
        "file name not UTF-8": {"value": valid, "filename": b"\xff\xfe"},
        "pickled key": {"key": bomb, "raw": 0, "value": valid},
        "pickled key, raw": {"key": bomb, "raw": 1, "value": valid},
        "digest key marked pickled": {"raw": 0, "value": valid},
        "raw unknown": {"raw": None, "value": valid},
        "blob key": {"key": RECORD.slot.encode(), "value": valid},
        "integer key": {"key": 5, "value": valid},
        "no key": {"key": None, "value": valid},
        "upper-case key": {"key": RECORD.slot.upper(), "value": valid},
        "terminal codes in key": {"key": "\x1b[2J" + "x" * 1000, "value": valid},
        "text value": {"value": "text"},
        "integer value": {"value": 7},
        "no value": {"value": None},
        "raw pickle": {"value": bomb},
        "empty": {"value": b""},
        "truncated": {"value": valid[:-1]},
        "trailing": {"value": valid + b"\0"},
        "no records": {"value": codec.encode({"format": 1})},
        "bad record": {"value": codec.encode({"format": 1, "records": [{"format": 1}]})},
        "unknown field": {"value": codec.encode({"format": 1, "records": [], "more": 1})},
        "other slot": {"value": codec.encode({"format": 1, "records": [a_record(m=2).to_value()]}, floats=True)},
        "twice": {"value": codec.encode({"format": 1, "records": [RECORD.to_value()] * 2}, floats=True)},
        "nesting bomb": {"value": b"\x91" * 100_000},
        "huge length": {"value": b"\xdd\xff\xff\xff\xff"},
    }
    return rows


def all_kinds(tmp_path: Path) -> tuple[dict[str, dict[str, object]], Path, Path]:
    outside = tmp_path / "outside"
    outside.mkdir()
    marker = tmp_path / "executed"
    return forged_rows(outside, marker), outside / "bomb.pickle", marker


def test_the_payload_would_be_executed_by_a_stock_cache(folder: Path, tmp_path: Path) -> None:
    rows, _, marker = all_kinds(tmp_path)
    plant(folder, **rows["mode 4"])
    with diskcache.Cache(str(folder)) as cache:
        cache.get(RECORD.slot)
    assert marker.exists()


def test_forged_rows_are_quarantined_misses_and_kept(folder: Path, tmp_path: Path) -> None:
    rows, bomb_file, marker = all_kinds(tmp_path)
    bomb = bomb_file.read_bytes()
    for name, columns in rows.items():
        rowid = plant(folder, **columns)
        before = [row for row in raw_rows(folder) if row[0] == rowid]
        for read_only in (True, False):
            with RecordStore(folder, read_only=read_only) as store:
                assert store.get(RECORD.problem, RECORD.environment.target) == (), name
                assert store.all() == (a_record(m=1),), name
                assert [q.rowid for q in store.quarantined] == [rowid], name
                (found,) = store.quarantined
                assert found.reason, name
                assert str(found).isprintable(), name
        # A put to the slot works, and what was there is still in the database, byte for byte.
        with RecordStore(folder) as store:
            assert store.put(RECORD) == NEW, name
            assert store.get(RECORD.problem, RECORD.environment.target) == (RECORD,), name
        with RecordStore(folder) as store:
            assert set(store.all()) == {a_record(m=1), RECORD}, name
            assert [q.rowid for q in store.quarantined] == [rowid], name
            after = [row for row in raw_rows(folder) if row[0] == rowid]
            assert after[0][2:] == before[0][2:], name
            assert store.remove(RECORD.digest) == (RECORD.digest,), name
        connection = sqlite3.connect(folder / "cache.db", isolation_level=None)
        connection.execute("DELETE FROM Cache WHERE rowid = ?", (rowid,))
        connection.close()
        assert bomb_file.read_bytes() == bomb, name
        assert not marker.exists(), name
    assert sorted(p.name for p in folder.iterdir()) == ["cache.db"]


def test_a_text_that_is_not_utf8_does_not_stop_the_scan(folder: Path) -> None:
    connection = sqlite3.connect(folder / "cache.db", isolation_level=None)
    for column in ("key", "filename", "value"):
        connection.execute(f"INSERT INTO Cache (raw, mode, {column}) VALUES (1, 1, CAST(x'fffe41' AS TEXT))")
    connection.close()
    with RecordStore(folder) as store:
        assert store.all() == (a_record(m=1),)
        assert len(store.quarantined) == 3


def test_a_huge_value_is_not_read(folder: Path) -> None:
    connection = sqlite3.connect(folder / "cache.db", isolation_level=None)
    row = (RECORD.slot, (16 << 20) + 1)
    connection.execute("INSERT INTO Cache (key, raw, mode, value) VALUES (?, 1, 1, zeroblob(?))", row)
    connection.close()
    with RecordStore(folder) as store:
        assert store.all() == (a_record(m=1),)
        assert "allowed" in store.quarantined[0].reason


def test_an_expired_row_is_neither_missed_nor_overwritten(folder: Path) -> None:
    value = codec.encode({"format": 1, "records": [RECORD.to_value()]}, floats=True)
    plant(folder, value=value, expire_time=1.0, tag=pickle.dumps(1))
    other = a_record(driver="575.1")
    with RecordStore(folder) as store:
        assert store.get(RECORD.problem, RECORD.environment.target) == (RECORD,)
        store.put(other)
        assert set(store.get(RECORD.problem, RECORD.environment.target)) == {RECORD, other}
        assert store.remove(other.digest, RECORD.digest)


def test_a_row_of_a_newer_format_is_a_miss_and_not_written_over(folder: Path) -> None:
    plant(folder, value=codec.encode({"format": 2, "things": []}))
    before = raw_rows(folder)
    with RecordStore(folder) as store:
        assert store.get(RECORD.problem, RECORD.environment.target) == ()
        assert "upgrade" in store.quarantined[0].reason
        with pytest.raises(IncompatibleError):
            store.put(RECORD)
    assert raw_rows(folder) == before


def test_a_value_with_any_byte_changed_never_crashes(folder: Path) -> None:
    with RecordStore(folder) as store:
        store.put(RECORD)
    value = codec.encode({"format": 1, "records": [RECORD.to_value()]}, floats=True)
    rng = random.Random(0)
    with RecordStore(folder) as store:
        connection = store._connection()
        for at in range(len(value)):
            bad = bytearray(value)
            bad[at] ^= 1 << rng.randrange(8)
            connection.execute("UPDATE Cache SET value = ? WHERE key = ?", (bytes(bad), RECORD.slot))
            # Some flips make another valid record (a sample's last bits); none may leak into another problem.
            for record in store.get(RECORD.problem, RECORD.environment.target):
                assert record.slot == RECORD.slot


TAMPERED = {
    "eviction_policy": "least-recently-stored",
    "cull_limit": 1000,
    "size_limit": 1,
    "disk_min_file_size": 0,
    "disk_pickle_protocol": "x",
    "disk_remove": "x",
    "disk__directory": "/",
    "sqlite_journal_mode": "off",
    "sqlite_synchronous": 0,
    "sqlite_writable_schema": 1,
    "sqlite_mmap_size": "0; DROP TABLE Cache",
    "_directory": "/tmp",
    "_disk": "x",
    "set": "x",
    "transact": None,
    "statistics": 1,
    "tag_index": 1,
    "count": "x",
}


@pytest.mark.parametrize("name", TAMPERED)
def test_settings_that_another_opener_changed_are_put_right(folder: Path, name: str) -> None:
    connection = sqlite3.connect(folder / "cache.db", isolation_level=None)
    connection.execute("INSERT OR REPLACE INTO Settings VALUES (?, ?)", (name, TAMPERED[name]))
    connection.close()
    many = [a_record(m=m) for m in range(2, 40)]
    with RecordStore(folder) as store:
        store.put_many(many)
        for record in many[:15]:
            store.put(a_record(m=record.problem.m, driver="575.1"))
        assert len(store.all()) == 1 + len(many) + 15
        assert database.unlike_required(store._connection()) == []
    assert sorted(p.name for p in folder.iterdir()) == ["cache.db"]


def test_settings_of_odd_types_are_removed(folder: Path) -> None:
    connection = sqlite3.connect(folder / "cache.db", isolation_level=None)
    connection.execute("INSERT INTO Settings VALUES (CAST(x'ff' AS TEXT), 1)")
    connection.execute("INSERT INTO Settings VALUES (?, 10)", (b"cull_limit",))
    connection.execute("UPDATE Settings SET value = CAST(x'ff' AS TEXT) WHERE key = 'eviction_policy'")
    connection.close()
    with RecordStore(folder) as store:
        assert store.put(RECORD) == NEW
        assert database.unlike_required(store._connection()) == []


def test_a_stock_opener_before_us_leaves_no_evicting_store(tmp_path: Path) -> None:
    with diskcache.Cache(str(tmp_path), eviction_policy="least-recently-used", size_limit=1, tag_index=1):
        pass
    with RecordStore(tmp_path) as store:
        store.put_many([a_record(m=m) for m in range(1, 40)])
        assert len(store.all()) == 39
    # Nor does a later stock opener evict: it takes over the settings that are stored.
    with diskcache.Cache(str(tmp_path)) as cache:
        cache["other"] = b"x" * 100_000
        assert len(cache) == 40
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache.db"]


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER t AFTER INSERT ON Cache BEGIN DELETE FROM Cache; END",
        "CREATE TRIGGER Settings_x AFTER UPDATE ON Cache BEGIN DELETE FROM Cache; END",
        "CREATE VIEW v AS SELECT * FROM Cache",
        "CREATE TABLE other (x)",
        "CREATE INDEX i ON Cache (abs(rowid))",
        "ALTER TABLE Cache ADD COLUMN more TEXT",
        "DROP INDEX Cache_key_raw; CREATE INDEX Cache_key_raw ON Cache (key, raw)",
        "DROP TABLE Cache; CREATE VIEW Cache AS SELECT 1 AS key",
        "DROP TABLE Settings; CREATE TABLE Settings (key, value)",
    ],
)
def test_a_schema_that_is_not_diskcaches_is_refused(folder: Path, statement: str) -> None:
    connection = sqlite3.connect(folder / "cache.db", isolation_level=None)
    connection.executescript(statement)
    connection.close()
    for read_only in (False, True):
        with (
            pytest.raises(IntegrityError, match=r"cache\.db"),
            RecordStore(folder, read_only=read_only),
        ):
            pass


def test_a_database_that_is_a_link_is_refused(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "cache.db").symlink_to(folder / "cache.db")
    for read_only in (False, True):
        with pytest.raises(IntegrityError, match="regular file"), RecordStore(elsewhere, read_only=read_only):
            pass


def test_truncation_anywhere_is_a_typed_error_or_a_whole_answer(folder: Path) -> None:
    data = (folder / "cache.db").read_bytes()
    good = {a_record(m=1)}
    for length in range(0, len(data), 1021):
        (folder / "cache.db").write_bytes(data[:length])
        try:
            with RecordStore(folder, read_only=True) as store:
                assert set(store.all()) <= good
        except (IntegrityError, OSError):
            pass


def test_the_disk_takes_digests_and_bytes_only(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("whole")
    disk = SafeDisk(str(tmp_path / "cache"))
    for key in ("x", 5, b"x", ("a",), "A" * 64, None):
        with pytest.raises(UsageError):
            disk.put(key)
    for value in ("text", 1, 1.5, None, {}, bytearray(b"x")):
        with pytest.raises(UsageError):
            disk.store(value, False)
    with pytest.raises(UsageError):
        disk.store(b"x", True)
    with pytest.raises(UsageError):
        disk.filename()
    for raw in (0, None, 2):
        with pytest.raises(IntegrityError):
            disk.get(pickle.dumps("a"), raw)
    for mode, name in ((4, None), (2, str(victim)), (3, str(victim)), (1, str(victim)), (0, None)):
        for read in (False, True):
            with pytest.raises(IntegrityError):
                disk.fetch(mode, name, b"x", read)
    for name in (str(victim), "../victim", "", "."):
        disk.remove(name)
    assert victim.read_text() == "whole"


def test_no_removal_of_the_cache_touches_a_planted_file(tmp_path: Path) -> None:
    victims = [tmp_path / f"victim{i}" for i in range(6)]
    for victim in victims:
        victim.write_text("whole")
    key = "ab" * 32
    cache = SafeCache(str(tmp_path / "cache"), disk=SafeDisk)
    try:

        def again() -> None:
            cache.connection.execute("DELETE FROM Cache")
            cache.connection.execute(
                "INSERT INTO Cache (key, raw, mode, filename, expire_time, tag) VALUES (?, 1, 2, ?, 1.0, 't')",
                (key, str(victims[0])),
            )

        for act in (
            cache.expire,
            cache.cull,
            cache.clear,
            lambda: cache.evict("t"),
            lambda: cache.set(key, b"x"),
            lambda: cache.add(key, b"x"),
            lambda: cache.delete(key),
        ):
            again()
            act()
            assert victims[0].read_text() == "whole"
        again()
        cache.connection.execute("UPDATE Cache SET expire_time = NULL")
        with pytest.raises(IntegrityError):
            cache.pop(key)
        assert victims[0].read_text() == "whole"
        again()
        cache.connection.execute("UPDATE Cache SET key = ?, raw = 0", (pickle.dumps(1),))
        with pytest.raises(IntegrityError):
            list(cache)
    finally:
        cache.close()
