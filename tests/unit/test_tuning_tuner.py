"""The tuner: what is measured, what is kept, what an interrupt loses."""

from __future__ import annotations

import pytest

from gemmcache.build.objects import ObjectCache
from gemmcache.errors import MeasurementError
from gemmcache.kernels.interface import Config, KernelFamily
from gemmcache.problem import ProblemFamily
from gemmcache.records.interface import FAILED, KERNEL, LIBRARY, OK, Trial
from gemmcache.target import Host
from gemmcache.tuning.candidates import CandidateSet, CompiledCandidates
from gemmcache.tuning.interface import Candidate
from gemmcache.tuning.tuner import Tuner
from tests.fakes import ENVIRONMENT, POLICY, TOOLCHAIN, FakeExecutor, MemoryRecords

FAST, SLOW = (Config.of("fake", tile=(64, n)) for n in (64, 128))
FAMILY = ProblemFamily.of(4096, 4096)
PROBLEMS = [FAMILY.at(m) for m in (1, 16, 256)]


def time_us(problem, config):
    """The fast config wins up to m = 16, then the library."""
    if config is None:
        return 20.0
    return (10.0 if problem.m <= 16 else 30.0) + (0 if config == FAST else 5)


@pytest.fixture
def tuner(tmp_path, monkeypatch):
    def made(executor=None, records=None):
        source = CompiledCandidates([], ObjectCache(tmp_path), TOOLCHAIN, Host("x86_64", "x86-64-v3"), tmp_path)
        candidates = (Candidate(FAST, "a" * 64, 0), Candidate(SLOW, "b" * 64, 1))
        broken = (Trial(Config.of("fake", tile=(1, 1)), FAILED, detail="does not compile"),)
        monkeypatch.setattr(source, "candidates", lambda *_: CandidateSet(candidates, broken, "", ""))
        return Tuner(
            executor or FakeExecutor(time_us), records if records is not None else MemoryRecords(), source, POLICY
        )

    return made


class Model(KernelFamily):
    """A cost model only: the slow config is estimated at three times the fast one's time."""

    name = "fake"
    source_digest = unsupported = configs = spec = compile = None

    def estimate_us(self, config, problem, target):
        return 10.0 if config == FAST else 30.0


def test_what_the_cost_model_rules_out_is_not_run_unless_it_is_the_incumbent(tuner):
    made = tuner()
    made.source.families = [Model()]
    record = made.tune(PROBLEMS[:1]).tuned[0]
    assert [t.config for t in record.trials if t.status == OK] == [FAST]
    candidates = made.source.candidates(FAMILY, ENVIRONMENT.target).candidates
    kept = made._plausible(PROBLEMS[0], ENVIRONMENT.target, candidates, SLOW)
    assert [c.config for c in kept] == [FAST, SLOW]


def test_each_problem_gets_a_record_with_winner_baseline_and_broken_candidates(tuner):
    records = MemoryRecords()
    summary = tuner(records=records).tune(PROBLEMS)
    assert [r.problem for r in records.records] == PROBLEMS
    assert [r.choice for r in summary.tuned] == [KERNEL, KERNEL, LIBRARY]
    record = records.records[0]
    assert record.winner is not None
    assert record.winner.config == FAST
    assert record.environment == ENVIRONMENT
    assert record.policy == POLICY
    assert [t.status for t in record.trials] == [OK, OK, FAILED]
    assert dict(record.conditions)["sm_mhz"] == 1980.0


def test_an_interrupted_run_resumes_without_measuring_again(tuner):
    records = MemoryRecords()

    class Interrupted(FakeExecutor):
        def run(self, task):
            if len(self.ran) == 2:
                raise KeyboardInterrupt
            return super().run(task)

    with pytest.raises(KeyboardInterrupt):
        tuner(Interrupted(time_us), records).tune(PROBLEMS)
    assert len(records.records) == 2
    second = FakeExecutor(time_us)
    summary = tuner(second, records).tune(PROBLEMS)
    assert second.ran == PROBLEMS[2:]
    assert [r.problem for r in summary.kept] == PROBLEMS[:2]


def test_another_driver_is_measured_again_and_the_old_record_stays(tuner):
    from dataclasses import replace

    records = MemoryRecords()
    tuner(records=records).tune(PROBLEMS)
    later = FakeExecutor(time_us, replace(ENVIRONMENT, driver="590.2"))
    tuner(later, records).tune(PROBLEMS)
    assert later.ran == PROBLEMS
    assert len(records.records) == 6


def test_again_measures_everything_with_the_old_winner_as_incumbent(tuner):
    records = MemoryRecords()
    tuner(records=records).tune(PROBLEMS[:1])

    def nearly_tied(problem, config):
        return {FAST: 10.03, SLOW: 10.0, None: 20.0}[config]

    summary = tuner(FakeExecutor(nearly_tied), records).tune(PROBLEMS[:1], again=True)
    assert summary.tuned[0].winner is not None
    assert summary.tuned[0].winner.config == FAST


def test_a_problem_that_fails_is_reported_and_the_others_go_on(tuner):
    class Failing(FakeExecutor):
        def run(self, task):
            if task.problem.m == 16:
                raise MeasurementError("does not fit in device memory")
            return super().run(task)

    noted = []
    summary = tuner(Failing(time_us)).tune(PROBLEMS, progress=lambda p, r, note: noted.append((p.m, note)))
    assert summary.failed == {PROBLEMS[1]: "does not fit in device memory"}
    assert len(summary.tuned) == 2
    assert noted == [(1, "tuned"), (16, "does not fit in device memory"), (256, "tuned")]
