"""Tuning a workload: one problem after another, until all are in the records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Protocol

from gemmcache.environment import CUDA_MAJOR, Environment
from gemmcache.errors import MeasurementError
from gemmcache.kernels.interface import Config
from gemmcache.problem import Problem
from gemmcache.records.interface import KERNEL, MeasurementPolicy, TuningRecord
from gemmcache.target import Target
from gemmcache.tuning.candidates import CandidateSource
from gemmcache.tuning.interface import Candidate, Outcome
from gemmcache.tuning.verdict import conclude
from gemmcache.tuning.worker import Task

BASELINE = "cublas"


class Executor(Protocol):
    """What measures tasks on one device."""

    @property
    def environment(self) -> Environment: ...

    def run(self, task: Task) -> Outcome: ...


class RecordSink(Protocol):
    """Where records are found and kept."""

    def lookup(
        self, problem: Problem, target: Target, environment: Environment | None = None
    ) -> TuningRecord | None: ...

    def put(self, record: TuningRecord) -> object: ...


@dataclass(slots=True)
class Summary:
    """What a tuning run did."""

    tuned: list[TuningRecord] = field(default_factory=list)
    #: Problems whose record of this environment and policy was there already.
    kept: list[TuningRecord] = field(default_factory=list)
    failed: dict[Problem, str] = field(default_factory=dict)


class Tuner:
    """Tunes problems with the candidates of `source` on the device behind `executor`; records go into `records`."""

    def __init__(
        self, executor: Executor, records: RecordSink, source: CandidateSource, policy: MeasurementPolicy
    ) -> None:
        self.executor, self.records, self.source, self.policy = executor, records, source, policy

    def tune(
        self,
        problems: Iterable[Problem],
        *,
        again: bool = False,
        progress: Callable[[Problem, TuningRecord | None, str], None] | None = None,
    ) -> Summary:
        """Measures each problem that has no record of this environment and policy (each one if `again`).

        A record is stored as soon as it is there, so an interrupted run resumes where it stopped. `progress` is
        called after each problem with its record, or None and why there is none. Raises `DeviceError` if the
        device can't be used at all.
        """
        summary = Summary()
        environment = self.executor.environment
        for problem in problems:
            known = self.records.lookup(problem, environment.target, environment)
            if known is not None and self._is_fresh(known) and not again:
                summary.kept.append(known)
                record: TuningRecord | None = known
                note = "kept"
            else:
                incumbent = known.trials[0].config if known is not None and known.choice == KERNEL else None
                record, note = self._one(problem, environment, incumbent, summary)
            if progress:
                progress(problem, record, note)
        return summary

    def _plausible(
        self, problem: Problem, target: Target, candidates: Sequence[Candidate], incumbent: Config | None
    ) -> tuple[Candidate, ...]:
        """The candidates that the cost models don't rule out by `policy.prune_milli`, and the incumbent."""
        models = {f.name: f for f in self.source.families}
        estimates = {
            c.kernel: models[c.config.kernel_family].estimate_us(c.config, problem, target)
            for c in candidates
            if c.config.kernel_family in models
        }
        limit = min(estimates.values(), default=0.0) * (self.policy.prune_milli / 1000 or float("inf"))
        return tuple(c for c in candidates if c.config == incumbent or estimates.get(c.kernel, 0.0) <= limit)

    def _is_fresh(self, record: TuningRecord) -> bool:
        return record.environment == self.executor.environment and record.policy == self.policy

    def pending(self, problems: Iterable[Problem], again: bool = False) -> list[Problem]:
        """The problems that `tune` would measure."""
        environment = self.executor.environment
        found = ((p, self.records.lookup(p, environment.target, environment)) for p in problems)
        return [p for p, record in found if again or record is None or not self._is_fresh(record)]

    def _one(
        self, problem: Problem, environment: Environment, incumbent: Config | None, summary: Summary
    ) -> tuple[TuningRecord | None, str]:
        made = self.source.candidates(problem.family, environment.target)
        candidates = self._plausible(problem, environment.target, made.candidates, incumbent)
        held = next((c.kernel for c in made.candidates if c.config == incumbent), None)
        # Of the toolchain that compiled them, which may be another machine's.
        cuda_major = environment.toolchain.cuda_major or CUDA_MAJOR
        task = Task(problem, candidates, held, self.policy, made.library, made.library_digest, cuda_major)
        try:
            outcome = self.executor.run(task)
            record = conclude(
                problem,
                environment,
                self.policy,
                replace(outcome, trials=(*outcome.trials, *made.broken)),
                order=made.order,
                baseline=BASELINE,
                measured_at=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
                incumbent=incumbent,
            )
        except MeasurementError as error:
            summary.failed[problem] = error.message
            return None, error.message
        self.records.put(record)
        summary.tuned.append(record)
        return record, "tuned"
