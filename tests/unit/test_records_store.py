"""The store: what is put comes back, newest first, per product; errors of the database are typed."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from gemmcache.environment import Environment, Toolchain
from gemmcache.epilogue import Epilogue
from gemmcache.errors import IntegrityError, MissingPackageError, StorageError, UsageError
from gemmcache.kernels.interface import Config
from gemmcache.problem import ProblemFamily
from gemmcache.records.content import decode_row, encode_row, newest_first
from gemmcache.records.interface import KERNEL, OK, MeasurementPolicy, Trial, TuningRecord
from gemmcache.records.store import KEPT, NEW, REPLACED, RecordStore, is_store
from gemmcache.target import TARGETS, Target
from tests.strategies import tuning_records

H200, H20 = TARGETS["h200"], TARGETS["h20"]
MIG = Target("sm_90a", 16, 10 << 20, 232448, "NVIDIA H200 MIG 1g.18gb")
FAMILY = ProblemFamily.of(4096, 4096)


def a_record(
    m: int = 16,
    target: Target = H200,
    driver: str = "580.1",
    at: str = "2026-12-01T12:00:00Z",
    family: ProblemFamily = FAMILY,
    us: float = 9.0,
) -> TuningRecord:
    config = Config.of("hopper", tile_m=64, tile_n=16)
    return TuningRecord(
        problem=family.at(m),
        environment=Environment(target, Toolchain(dsl="4.8.1"), driver=driver),
        policy=MeasurementPolicy(),
        choice=KERNEL,
        trials=(Trial(config, OK, (us, us, us), 0.001),),
        baseline="torch.mm",
        baseline_us=(10.0, 10.5),
        measured_at=at,
    )


def test_what_is_put_comes_back_after_reopening(tmp_path: Path) -> None:
    record = a_record()
    with RecordStore(tmp_path / "new" / "folder") as store:
        assert store.put(record) == NEW
    with RecordStore(tmp_path / "new" / "folder") as store:
        assert store.get(record.problem, H200) == (record,)
        assert store.all() == (record,)
        assert store.quarantined == ()


def test_records_of_old_drivers_stay_newest_first(tmp_path: Path) -> None:
    old = a_record(driver="570.1", at="2026-01-01T00:00:00Z")
    new = a_record(driver="580.1", at="2026-06-01T00:00:00Z")
    newest = a_record(driver="575.1", at="2026-06-01T00:00:00.5+00:00")
    with RecordStore(tmp_path) as store:
        for record in (new, old, newest):
            assert store.put(record) == NEW
        assert store.get(old.problem, H200) == (newest, new, old)


def test_of_one_digest_the_newer_measurement_wins_and_equal_stays(tmp_path: Path) -> None:
    first = a_record(at="2026-06-01T00:00:00Z", us=9.0)
    same_time = replace(first, trials=a_record(us=8.0).trials)
    older = replace(same_time, measured_at="2026-05-31T23:59:59Z")
    newer = replace(same_time, measured_at="2026-06-01T00:00:01Z")
    assert len({r.digest for r in (first, same_time, older, newer)}) == 1
    with RecordStore(tmp_path) as store:
        assert store.put(first) == NEW
        assert (store.put(same_time), store.put(older), store.put(first)) == (KEPT, KEPT, KEPT)
        assert store.all() == (first,)
        assert store.put(newer) == REPLACED
        assert store.all() == (newer,)


@pytest.mark.parametrize("other", [H20, MIG, replace(H200, sm_count=131)], ids=["h20", "mig", "fewer SMs"])
def test_products_of_one_chip_never_share_records(tmp_path: Path, other: Target) -> None:
    record = a_record()
    with RecordStore(tmp_path) as store:
        store.put(record)
        assert store.get(record.problem, other) == ()
        theirs = a_record(target=other)
        assert store.put(theirs) == NEW
        assert store.get(record.problem, other) == (theirs,)
        assert store.get(record.problem, H200) == (record,)


def test_problems_that_differ_in_one_field_have_records_of_their_own(tmp_path: Path) -> None:
    other = {
        "n": 4104,
        "k": 4104,
        "a_dtype": "float16",
        "b_dtype": "float16",
        "out_dtype": "float32",
        "acc_dtype": "float16",
        "batch": 2,
        "a_layout": "km",
        "b_layout": "kn",
        "out_layout": "nm",
    }
    assert set(other) == {f.name for f in fields(ProblemFamily)} - {"epilogue"}
    families = [FAMILY, *(replace(FAMILY, **{name: value}) for name, value in other.items())]
    steps = ["bias", "gelu", "gelu_tanh", "residual", "residual*0.5", "scale_row", "scale_column", "swiglu"]
    families += [replace(FAMILY, epilogue=Epilogue.parse(s)) for s in steps]
    records = [a_record(family=family) for family in families] + [a_record(m=17)]
    with RecordStore(tmp_path) as store:
        changes = store.put_many(records)
        assert len(set(changes.new)) == len(records)
        for record in records:
            assert store.get(record.problem, H200) == (record,)


def test_remove_takes_one_record_and_leaves_its_neighbours(tmp_path: Path) -> None:
    old, new = a_record(driver="570.1"), a_record(driver="580.1")
    alone = a_record(m=32)
    with RecordStore(tmp_path) as store:
        store.put_many([old, new, alone])
        assert set(store.remove(old.digest, alone.digest, "0" * 64)) == {old.digest, alone.digest}
        assert store.all() == (new,)
        assert store.remove(old.digest) == ()


def test_put_many_is_all_or_nothing(tmp_path: Path) -> None:
    good = a_record()
    bad = replace(a_record(m=32), conditions=(("power_w", float("inf")),))
    with RecordStore(tmp_path) as store:
        with pytest.raises(UsageError):
            store.put_many([good, bad])
        assert store.all() == ()
        assert store.put(good) == NEW


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tuning_records())
def test_a_row_holds_any_record(record: TuningRecord) -> None:
    assert decode_row(record.slot, encode_row([record])) == (record,)
    with pytest.raises(IntegrityError):
        decode_row("0" * 64, encode_row([record]))


def test_newest_first_puts_unreadable_times_last() -> None:
    records = [a_record(at=at) for at in ("whenever", "2026-01-01T00:00:00Z", "2026-01-01T00:30:00+01:00")]
    order = [r.measured_at for r in newest_first(records)]
    assert order == ["2026-01-01T00:00:00Z", "2026-01-01T00:30:00+01:00", "whenever"]


def test_reading_only_needs_no_diskcache_and_writes_nothing(tmp_path: Path, monkeypatch) -> None:
    record = a_record()
    with RecordStore(tmp_path) as store:
        store.put(record)
    before = (tmp_path / "cache.db").read_bytes()
    monkeypatch.setitem(sys.modules, "diskcache", None)
    monkeypatch.delitem(sys.modules, "gemmcache.records.disk")
    with RecordStore(tmp_path, read_only=True) as store:
        assert store.all() == (record,)
        with pytest.raises(UsageError, match="reading only"):
            store.put(record)
    assert (tmp_path / "cache.db").read_bytes() == before
    with pytest.raises(MissingPackageError, match="diskcache"), RecordStore(tmp_path):
        pass


def test_a_reader_sees_what_a_writer_commits_meanwhile(tmp_path: Path) -> None:
    with RecordStore(tmp_path) as writer, RecordStore(tmp_path, read_only=True) as reader:
        assert reader.all() == ()
        writer.put(a_record())
        assert len(reader.all()) == 1


def run_on_read_only_mount(folder: Path, script: str) -> list[str]:
    """Lines that Python code prints in a process that sees `folder` mounted read-only."""
    mount = f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("mounts are not allowed here")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, script],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


needs_mounts = pytest.mark.skipif(not shutil.which("unshare") or os.geteuid() != 0, reason="needs root for a mount")


@needs_mounts
def test_records_are_read_from_a_read_only_mount(tmp_path: Path) -> None:
    record = a_record()
    with RecordStore(tmp_path) as store:
        store.put(record)
    script = (
        "from gemmcache.errors import StorageError\n"
        "from gemmcache.records.store import RecordStore\n"
        f"with RecordStore({str(tmp_path)!r}, read_only=True) as s: print(s.all()[0].digest)\n"
        f"try: RecordStore({str(tmp_path)!r}).__enter__()\n"
        "except StorageError as e: print('refused', bool(e.remedy))\n"
    )
    assert run_on_read_only_mount(tmp_path, script)[:2] == [record.digest, "refused True"]


@needs_mounts
def test_pending_writes_on_a_read_only_mount_are_not_overlooked(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    with RecordStore(tmp_path) as store:
        store.put(a_record())
        for name in ("cache.db", "cache.db-wal"):
            shutil.copy(tmp_path / name, copy / name)
    assert (copy / "cache.db-wal").stat().st_size
    script = (
        "from gemmcache.errors import StorageError\n"
        "from gemmcache.records.store import RecordStore\n"
        "try:\n"
        f"    with RecordStore({str(copy)!r}, read_only=True) as s: print(len(s.all()))\n"
        "except StorageError: print('refused')\n"
    )
    assert run_on_read_only_mount(copy, script)[0] in ("1", "refused")


def test_a_file_system_that_refuses_bytes_leaves_a_store_that_works(tmp_path: Path) -> None:
    """The write fails at COMMIT here, when the log can't grow; nothing may stay locked or half stored."""
    script = f"""
import resource
from dataclasses import replace
from gemmcache.errors import StorageError
from gemmcache.records.store import RecordStore
folder = {str(tmp_path)!r}
with RecordStore(folder) as store:
    (first,) = store.all()
    large = replace(first, baseline="x" * 4000)
    many = [replace(large, environment=replace(first.environment, driver=str(d))) for d in range(100)]
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        store.put_many(many)
    except StorageError as error:
        print("refused", bool(error.remedy))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    print(len(store.all()), store._connection().in_transaction)
    with RecordStore(folder, timeout=0.1) as other:
        other.put_many(many)
    print(len(store.put_many(many).kept))
"""
    with RecordStore(tmp_path) as store:
        store.put(a_record())
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment())
    assert done.stdout.split("\n")[:3] == ["refused True", "1 False", "100"], done.stderr


def test_a_full_disk_is_a_storage_error_and_loses_nothing(tmp_path: Path) -> None:
    with RecordStore(tmp_path) as store:
        kept = [a_record(m=m) for m in range(1, 9)]
        store.put_many(kept)
        connection = store._connection()
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages + 1}")
        with pytest.raises(StorageError, match="full") as caught:
            store.put_many([a_record(m=m) for m in range(100, 200)])
        assert "free space" in caught.value.remedy
        assert sorted(store.all(), key=lambda r: r.problem.m) == kept
        connection.execute("PRAGMA max_page_count = 100000")
        assert store.put(a_record(m=100)) == NEW


def test_a_commit_that_fails_leaves_no_transaction_open(tmp_path: Path) -> None:
    with RecordStore(tmp_path) as store:
        connection = store._connection()
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("CREATE TEMP TABLE parent (id INTEGER PRIMARY KEY)")
        connection.execute("CREATE TEMP TABLE child (id REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")
        with pytest.raises(IntegrityError, match="constraint"), store._writing("a test") as cache:
            cache.connection.execute("INSERT INTO child VALUES (1)")
        assert not connection.in_transaction
        with RecordStore(tmp_path, timeout=0.05) as other:
            assert other.put(a_record()) == NEW


def test_a_locked_database_is_a_storage_error(tmp_path: Path) -> None:
    with RecordStore(tmp_path, timeout=0.05) as store:
        other = sqlite3.connect(tmp_path / "cache.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageError, match="locked") as caught:
            store.put(a_record())
        assert "another process" in caught.value.remedy
        other.execute("ROLLBACK")
        other.close()
        assert store.put(a_record()) == NEW


def test_a_read_only_database_is_a_storage_error(tmp_path: Path) -> None:
    with RecordStore(tmp_path) as store:
        store._connection().execute("PRAGMA query_only = ON")
        with pytest.raises(StorageError, match="readonly") as caught:
            store.put(a_record())
        assert caught.value.remedy


@pytest.mark.parametrize("size", [1, 100, 5000])
def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path, size: int) -> None:
    (tmp_path / "cache.db").write_bytes(b"x" * size)
    for read_only in (False, True):
        with pytest.raises(IntegrityError), RecordStore(tmp_path, read_only=read_only):
            pass
    assert (tmp_path / "cache.db").read_bytes() == b"x" * size


def test_a_folder_that_is_a_file_or_would_be_expanded_is_refused(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError), RecordStore(tmp_path / "file"):
        pass
    monkeypatch.setenv("ELSEWHERE", "elsewhere")
    with pytest.raises(UsageError, match="expanded"), RecordStore(tmp_path / "$ELSEWHERE"):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_a_store_that_is_not_open_says_so(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    for call in (store.all, lambda: store.put(a_record()), lambda: store.remove("0" * 64)):
        with pytest.raises(UsageError, match="not open"):
            call()
    assert not is_store(tmp_path)
    with pytest.raises(StorageError), RecordStore(tmp_path, read_only=True):
        pass


def test_a_forked_child_may_use_the_parents_store(tmp_path: Path) -> None:
    record = a_record()
    for read_only in (False, True):
        with RecordStore(tmp_path) as store:
            store.put(record)
        with RecordStore(tmp_path, read_only=read_only) as store:
            inherited = store._connection()
            pid = os.fork()
            if pid == 0:
                os._exit(0 if store.all() == (record,) and store._connection() is not inherited else 1)
            assert os.waitpid(pid, 0)[1] == 0
            assert store.all() == (record,)
