"""Stand-ins for what a test can't have: a GPU, and a timer that does what the test wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from gemmcache.environment import Environment, Toolchain
from gemmcache.errors import MeasurementError
from gemmcache.kernels.interface import Config
from gemmcache.problem import Problem
from gemmcache.records.interface import MeasurementPolicy, TuningRecord
from gemmcache.target import TARGETS, Target
from gemmcache.tuning.interface import LIBRARY_KEY, Candidate, Outcome, ProblemBench
from gemmcache.tuning.search import search
from gemmcache.tuning.worker import Task

H200 = TARGETS["h200"]
TOOLCHAIN = Toolchain(dsl="4.8.1", cuda_major=13, tvm_ffi="0.1.15", kernel_sources=(("fake", "0" * 64),))
ENVIRONMENT = Environment(H200, TOOLCHAIN, driver="580.1", cuda_runtime="13.0", torch="2.11", cublas="13.1")

#: Microseconds by key: a constant, or an iterator that is drawn from at every sample.
Times = Mapping[str, float | Iterator[float]]


def candidate(i: int) -> Candidate:
    """A candidate whose key is sixty-four times one digit's hex form."""
    return Candidate(Config.of("fake", tile=(64, 64 * (i + 1))), f"{i:x}" * 64 if i < 16 else f"{i:064x}", i)


class FakeBench(ProblemBench):
    """A bench with scripted times, errors and failures; it notes what was asked of it."""

    def __init__(
        self,
        times: Times,
        errors: Mapping[str, float] | None = None,
        failing: Sequence[str] = (),
        on_prepare: Callable[[str], None] = lambda key: None,
    ) -> None:
        self.times, self.errors, self.failing, self.on_prepare = times, errors or {}, failing, on_prepare
        #: Keys whose timing or checking fails, as a kernel's that refuses what prepare did not ask of it.
        self.failing_later: tuple[str, ...] = ()
        self.sampled: list[str] = []
        self.checked: list[str] = []
        #: Before which of the samples it rested.
        self.rested: list[int] = []

    def prepare(self, key: str) -> None:
        self.on_prepare(key)
        if key in self.failing:
            raise MeasurementError("the kernel refused its arguments")

    def sample_us(self, key: str) -> float:
        self.sampled.append(key)
        if key in self.failing_later:
            raise MeasurementError("the kernel refused its arguments")
        value = self.times[key]
        return value if isinstance(value, (int, float)) else next(value)

    def rest(self, seconds: float) -> None:
        self.rested.append(len(self.sampled))

    def error(self, key: str) -> float:
        self.checked.append(key)
        return self.errors.get(key, 0.001)

    def conditions(self) -> dict[str, float]:
        return {"sm_mhz": 1980.0}

    def release(self, key: str) -> None:
        pass


class FakeExecutor:
    """Measures tasks with a time for each (problem, config); counts what it ran."""

    def __init__(
        self, time_us: Callable[[Problem, Config | None], float], environment: Environment = ENVIRONMENT
    ) -> None:
        self.environment = environment
        self.time_us = time_us
        self.ran: list[Problem] = []

    def run(self, task: Task) -> Outcome:
        self.ran.append(task.problem)
        times: dict[str, float] = {LIBRARY_KEY: self.time_us(task.problem, None)}
        times.update({c.kernel: self.time_us(task.problem, c.config) for c in task.candidates})
        return search(FakeBench(times), task.candidates, task.policy, incumbent=task.incumbent)


class MemoryRecords:
    """Records in a dict, looked up as the real ones are."""

    def __init__(self, *records: TuningRecord) -> None:
        self.records = list(records)

    def lookup(self, problem: Problem, target: Target, environment: Environment | None = None) -> TuningRecord | None:
        found = [r for r in self.records if r.problem == problem and r.environment.target.key == target.key]
        same = [r for r in found if r.environment == environment]
        return (same or found or [None])[-1]

    def on_siblings(self, target: Target) -> list[TuningRecord]:
        return [r for r in self.records if r.environment.target.is_sibling(target)]

    def put(self, record: TuningRecord) -> None:
        self.records.append(record)


POLICY = MeasurementPolicy()
