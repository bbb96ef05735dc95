"""Tuning runs that are killed, and two at once: no record is lost, none is measured twice."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gemmcache.errors import DeviceError
from gemmcache.problem import ProblemFamily
from gemmcache.records.interface import FAILED, KERNEL, LIBRARY, MeasurementPolicy, TuningRecord
from gemmcache.records.layers import Records
from gemmcache.tuning.executor import WorkerExecutor
from gemmcache.tuning.search import search
from gemmcache.tuning.worker import Task
from tests.conftest import ROOT
from tests.fakes import ENVIRONMENT, TOOLCHAIN, FakeBench

PROGRAM = Path(__file__).with_name("tune_process.py")
COUNT = 60


def start(records: Path, log: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(PROGRAM), str(records), str(log.parent), str(log), str(COUNT)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def finish(process: subprocess.Popen[str]) -> list[list[str]]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return [line.split() for line in out.splitlines()]


def stored(folder: Path) -> dict[int, TuningRecord]:
    """The records by m, without the moment at which they were taken."""
    with Records.open(folder, shipped=False, read_only=True) as records:
        found = [layered.record for layered in records.all()]
        assert records.quarantined == ()
    assert len({r.digest for r in found}) == len(found)
    return {r.problem.m: replace(r, measured_at="") for r in found}


def measured(log: Path) -> list[int]:
    return [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("measured")]


def workers(log: Path) -> list[int]:
    return [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("worker")]


def gone(pid: int) -> bool:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, TuningRecord]:
    place = tmp_path_factory.mktemp("undisturbed")
    said = finish(start(place / "records", place / "log"))
    assert said == [[str(m), "tuned"] for m in range(1, COUNT + 1)]
    return stored(place / "records")


def test_an_undisturbed_run_records_every_problem(undisturbed):
    assert sorted(undisturbed) == list(range(1, COUNT + 1))
    assert {m: r.choice for m, r in undisturbed.items()} == {
        m: KERNEL if m % 3 == 0 else LIBRARY for m in range(1, COUNT + 1)
    }
    # Candidates that killed their worker are in the records of their problems.
    assert all((FAILED in {t.status for t in r.trials}) == (m % 10 == 0) for m, r in undisturbed.items())


def test_a_tuning_run_that_is_killed_over_and_over_resumes_and_ends_with_the_same_records(undisturbed, tmp_path):
    records, draw, kills = tmp_path / "records", random.Random(5), 0
    for turn in range(40):
        before = stored(records) if records.exists() else {}
        log = tmp_path / f"log{turn}"
        process = start(records, log)
        assert process.stdout is not None
        # Kill it somewhere in the work, not while Python starts.
        kept = len(before)
        for _ in range(kept + 1):
            if not process.stdout.readline():
                break
        time.sleep(draw.uniform(0.0, 0.15))
        process.kill()
        out, err = process.communicate(timeout=60)
        assert process.returncode in (0, -9), err
        after = stored(records)
        # What was there stays as it was, and what was said to be stored is.
        assert before.items() <= after.items()
        # The last line may have been cut by the kill.
        assert {int(line.split()[0]) for line in out.split("\n")[:-1]} <= after.keys()
        # Nothing that had a record is measured again.
        assert not set(measured(log)) & before.keys()
        assert all(gone(pid) for pid in workers(log)), "a worker outlives its tuner"
        if process.returncode == 0:
            break
        kills += 1
    assert kills >= 3
    assert stored(records) == undisturbed
    assert finish(start(records, tmp_path / "last")) == [[str(m), "kept"] for m in range(1, COUNT + 1)]
    assert measured(tmp_path / "last") == []


def test_two_tuners_of_one_folder_end_with_the_same_records(undisturbed, tmp_path):
    records = tmp_path / "records"
    both = [start(records, tmp_path / f"log{i}") for i in range(2)]
    for process in both:
        assert len(finish(process)) == COUNT
    assert stored(records) == undisturbed
    # Together they measured each problem at least once, and each of them at most once.
    logs = [measured(tmp_path / f"log{i}") for i in range(2)]
    assert set(logs[0]) | set(logs[1]) == set(undisturbed)
    assert all(len(log) == len(set(log)) for log in logs)


def dying_between_tasks(pipe, device, toolchain):
    """A worker that is dead as soon as it has answered: what a late device error or an OOM killer does."""
    pipe.send(("environment", ENVIRONMENT))
    task = pipe.recv()
    pipe.send(("outcome", search(FakeBench({"library": 20.0}), (), task.policy)))
    os._exit(1)


def dying_before_each_task(pipe, device, toolchain):
    pipe.send(("environment", ENVIRONMENT))
    pipe.recv()
    os._exit(1)


def task(m: int) -> Task:
    return Task(ProblemFamily.of(4096, 4096).at(m), (), None, MeasurementPolicy(), "", "", 13)


def test_a_worker_that_dies_between_two_problems_costs_none_of_them():
    with WorkerExecutor(0, TOOLCHAIN, body=dying_between_tasks) as executor:
        for m in (1, 2, 4):
            assert executor.run(task(m)).baseline_us
            # Not waited for: it may die before, while or after the next task is sent.
            time.sleep(0.001 * m)


def test_a_worker_that_never_stays_alive_is_a_device_error():
    with (
        WorkerExecutor(0, TOOLCHAIN, body=dying_before_each_task) as executor,
        pytest.raises(DeviceError, match="does not stay alive"),
    ):
        executor.run(task(1))
