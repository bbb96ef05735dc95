"""Several processes on one records folder, and processes that are killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from gemmcache.records import database
from gemmcache.records.store import NEW, RecordStore, is_store

# Puts records of m = start, start + step, ... and says each m once it is stored.
WORKER = """
import sys
from gemmcache.environment import Environment, Toolchain
from gemmcache.problem import ProblemFamily
from gemmcache.records.interface import LIBRARY, MeasurementPolicy, TuningRecord
from gemmcache.records.store import RecordStore
from gemmcache.target import TARGETS

folder, driver, start, step, count = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])

def record(m):
    return TuningRecord(
        ProblemFamily.of(4096, 4096).at(m), Environment(TARGETS["h200"], Toolchain(), driver=driver),
        MeasurementPolicy(), LIBRARY, (), "torch.mm", (10.0, 11.0), "2026-06-01T00:00:00Z",
    )

with RecordStore(folder) as store:
    for i in range(count):
        store.put(record(start + i * step))
        print(start + i * step, flush=True)
"""


def worker(folder: Path, driver: str, start: int, step: int, count: int) -> subprocess.Popen[str]:
    arguments = [str(folder), driver, *map(str, (start, step, count))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", WORKER, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_four_processes_create_and_fill_one_store(tmp_path: Path) -> None:
    count = 25
    # Workers 0 and 1 write to the same slots (different drivers), 2 and 3 to their own; all create the folder.
    folder = tmp_path / "new"
    workers = [worker(folder, str(i), 1 if i < 2 else 1000 * i, 1, count) for i in range(4)]
    for process in workers:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert len(out.split()) == count
    with RecordStore(folder) as store:
        found = {(r.environment.driver, r.problem.m) for r in store.all()}
        assert store.quarantined == ()
    expected = {(str(i), (1 if i < 2 else 1000 * i) + j) for i in range(4) for j in range(count)}
    assert found == expected


def test_killed_processes_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    steady = worker(tmp_path, "steady", 1, 1, 150)
    acknowledged: set[int] = set()
    for round_ in range(4):
        victim = worker(tmp_path, "victim", 1 + round_ * 10_000, 1, 10_000)
        assert victim.stdout is not None
        first = victim.stdout.readline()
        assert first, victim.stderr.read() if victim.stderr else ""
        time.sleep(0.02 + 0.013 * round_)
        victim.send_signal(signal.SIGKILL)
        out, _ = victim.communicate(timeout=30)
        # The last line may have been cut by the kill.
        lines = (first + out).split("\n")[:-1]
        acknowledged |= {int(line) for line in lines}
    out, err = steady.communicate(timeout=60)
    assert steady.returncode == 0, err
    with RecordStore(tmp_path) as store:
        records = store.all()
        assert store.quarantined == ()
        assert store._connection().execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert {r.problem.m for r in records if r.environment.driver == "steady"} == set(range(1, 151))
        assert {r.problem.m for r in records if r.environment.driver == "victim"} >= acknowledged
        assert store.remove(records[0].digest)
        assert store.put(records[0]) == NEW
    assert len(acknowledged) >= 4


def test_a_process_killed_while_creating_the_store_leaves_one_that_works(tmp_path: Path) -> None:
    opener = "import sys, time; from gemmcache.records import disk, store; print('ready', flush=True)\n"
    opener += "sys.stdin.readline(); store.RecordStore(sys.argv[1]).__enter__()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    for delay_ms in (0, 2, 4, 6, 9, 12):
        folder = tmp_path / str(delay_ms)
        command = [sys.executable, "-c", opener, str(folder)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("\n")
        process.stdin.flush()
        time.sleep(delay_ms / 1000)
        process.kill()
        process.communicate()
        if is_store(folder):
            with RecordStore(folder, read_only=True) as store:
                assert store.all() == ()
        with RecordStore(folder) as store:
            assert store.all() == ()
            assert database.unlike_required(store._connection()) == []


def test_a_reader_takes_a_database_without_tables_for_an_empty_store(tmp_path: Path) -> None:
    (tmp_path / "cache.db").touch()
    with RecordStore(tmp_path, read_only=True) as reader:
        assert reader.all() == ()
        with RecordStore(tmp_path):
            pass
        assert reader.all() == ()


def test_threads_share_a_store(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor
    from dataclasses import replace

    process = worker(tmp_path, "1", 1, 1, 1)
    assert process.wait(timeout=30) == 0
    process.communicate()
    with RecordStore(tmp_path) as store:
        (seed,) = store.all()
        many = [replace(seed, environment=replace(seed.environment, driver=str(d))) for d in range(2, 42)]
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(store.put, many)) == {NEW}
        assert set(store.all()) == {seed, *many}
