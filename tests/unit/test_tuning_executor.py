"""The worker process: candidates that kill or hang it cost themselves, not the run."""

from __future__ import annotations

import os
import signal
import time

import pytest

from gemmcache.errors import DeviceError, MeasurementError
from gemmcache.problem import ProblemFamily
from gemmcache.records.interface import FAILED, OK
from gemmcache.tuning.executor import WorkerExecutor
from gemmcache.tuning.interface import LIBRARY_KEY
from gemmcache.tuning.search import search
from gemmcache.tuning.worker import Task
from tests.fakes import ENVIRONMENT, POLICY, TOOLCHAIN, FakeBench, candidate

ABORTING, HANGING, POISONING = candidate(1).kernel, candidate(2).kernel, candidate(3).kernel
CANDIDATES = tuple(candidate(i) for i in range(5))


def fake_body(pipe, device, toolchain):
    """A worker whose candidates 1, 2 and 3 abort, hang and lose the device."""
    pipe.send(("environment", ENVIRONMENT))

    def strike(key):
        if key == ABORTING:
            os.kill(os.getpid(), signal.SIGABRT)
        if key == HANGING:
            time.sleep(60)
        if key == POISONING:
            raise DeviceError("an illegal memory access was encountered")

    while (task := pipe.recv()) is not None:
        if task.problem.m == 7:
            pipe.send(("failed", "does not fit in device memory"))
            continue
        if task.problem.m == 9:
            pipe.send(("broken", "KeyError: 'x'"))
            return
        times = {LIBRARY_KEY: 25.0, **{c.kernel: 20.0 + c.order for c in task.candidates}}
        try:
            outcome = search(
                FakeBench(times, on_prepare=strike), task.candidates, task.policy, lambda k: pipe.send(("start", k))
            )
        except DeviceError as error:
            pipe.send(("lost", str(error)))
            return
        pipe.send(("outcome", outcome))


def dying_body(pipe, device, toolchain):
    pipe.send(("lost", "no CUDA device is visible"))


def killing_library_body(pipe, device, toolchain):
    pipe.send(("environment", ENVIRONMENT))
    pipe.recv()
    pipe.send(("start", LIBRARY_KEY))
    os._exit(3)


def task(m, candidates=CANDIDATES):
    return Task(ProblemFamily.of(4096, 4096).at(m), candidates, None, POLICY, "", "", 13)


def test_crash_hang_and_lost_device_become_failed_trials_and_the_rest_is_measured():
    with WorkerExecutor(0, TOOLCHAIN, body=fake_body, step_s=2.0) as executor:
        assert executor.environment == ENVIRONMENT
        outcome = executor.run(task(16))
        trials = {t.config: t for t in outcome.trials}
        assert [trials[candidate(i).config].status for i in range(5)] == [OK, FAILED, FAILED, FAILED, OK]
        assert "SIGABRT" in trials[candidate(1).config].detail or "-6" in trials[candidate(1).config].detail
        assert "hung" in trials[candidate(2).config].detail
        assert "illegal memory access" in trials[candidate(3).config].detail
        # The fresh worker goes on with the next problem.
        assert len(executor.run(task(32, CANDIDATES[:1])).trials) == 1


def test_a_problem_that_cannot_be_measured_leaves_the_worker_in_use():
    with WorkerExecutor(0, TOOLCHAIN, body=fake_body) as executor:
        with pytest.raises(MeasurementError, match="memory"):
            executor.run(task(7, ()))
        assert executor.run(task(8, ())).baseline_us


def test_an_unforeseen_error_fails_the_problem_and_a_fresh_worker_goes_on():
    with WorkerExecutor(0, TOOLCHAIN, body=fake_body) as executor:
        with pytest.raises(MeasurementError, match="KeyError"):
            executor.run(task(9, ()))
        assert executor.run(task(8, ())).baseline_us


def test_a_worker_that_does_not_start_is_a_device_error():
    with WorkerExecutor(0, TOOLCHAIN, body=dying_body) as executor, pytest.raises(DeviceError, match="CUDA"):
        _ = executor.environment


def test_the_library_killing_the_worker_is_a_device_error():
    with (
        WorkerExecutor(0, TOOLCHAIN, body=killing_library_body) as executor,
        pytest.raises(DeviceError, match="library"),
    ):
        executor.run(task(16))
