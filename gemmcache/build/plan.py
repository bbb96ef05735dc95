"""The plan of a build: for every problem what will serve it, and the unique kernels that this takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Protocol

from gemmcache.build.predict import Predictor
from gemmcache.bundle.interface import KERNEL, LIBRARY, PREDICTED, TUNED, DispatchTable, Entry
from gemmcache.environment import Environment, Toolchain
from gemmcache.errors import MissingRecordError
from gemmcache.kernels.identity import kernel_digest
from gemmcache.kernels.interface import Config, KernelFamily, KernelSpec
from gemmcache.models.interface import Workload
from gemmcache.problem import Problem, ProblemFamily
from gemmcache.records.interface import OK, Trial, TuningRecord
from gemmcache.target import Host, Target


class RecordSource(Protocol):
    """Where a plan finds tuning records."""

    def lookup(
        self, problem: Problem, target: Target, environment: Environment | None = None
    ) -> TuningRecord | None: ...

    def on_siblings(self, target: Target) -> Iterable[TuningRecord]: ...


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """What one target's part of a bundle will hold. `specs` maps kernel digests to what must be compiled."""

    target: Target
    tables: tuple[DispatchTable, ...]
    specs: Mapping[str, KernelSpec]
    driver: str | None
    cuda_runtime: str | None

    @property
    def entries(self) -> list[Entry]:
        return [e for t in self.tables for e in t.entries]

    def counts(self) -> dict[str, int]:
        """How many entries, unique kernels, entries by choice and origin."""
        choices = Counter(e.choice for e in self.entries)
        return {
            "entries": len(self.entries),
            "unique_kernels": len(self.specs),
            "kernel_entries": choices[KERNEL],
            "library_entries": choices[LIBRARY],
            "predicted_entries": sum(e.origin == PREDICTED for e in self.entries),
        }


def speedup(entries: Sequence[Entry]) -> float | None:
    """Geometric mean of library time over the time of what serves, over the tuned entries; None without any."""
    ratios = [e.library_us / e.us if e.choice == KERNEL else 1.0 for e in entries if e.us and e.library_us]
    return geometric_mean(ratios) if ratios else None


class Planner:
    """Plans builds for one set of kernel families, toolchain and host."""

    def __init__(
        self, records: RecordSource, families: Mapping[str, KernelFamily], toolchain: Toolchain, host: Host
    ) -> None:
        self.records, self.families, self.toolchain, self.host = records, families, toolchain, host

    def plan(
        self,
        workload: Workload,
        target: Target,
        *,
        ms: tuple[int, ...] | None = None,
        require_tuned: bool = False,
        untuned: str = "predict",
    ) -> TargetPlan:
        """Entries for every problem of `workload` on `target`: by its tuning record, else by prediction, or by the
        library if `untuned` is `library`.

        Raises `MissingRecordError` that lists what is not tuned if `require_tuned`.
        """
        specs: dict[str, KernelSpec] = {}
        tables: list[DispatchTable] = []
        used: list[TuningRecord] = []
        missing: list[Problem] = []
        predictor: Predictor | None = None
        for family, count in workload.families().items():
            entries = []
            for m in workload.ms(family, ms):
                problem = family.at(m)
                record = self.records.lookup(problem, target)
                if record is None:
                    missing.append(problem)
                    config = None
                    if untuned == "predict":
                        predictor = predictor or Predictor(self.records.on_siblings(target), self.families, target)
                        config = predictor.predict(problem)
                    entry, spec = self._predicted(problem, target, config)
                else:
                    used.append(record)
                    entry, spec = self._tuned(problem, target, record)
                if spec is not None and entry.kernel is not None:
                    specs[entry.kernel] = spec
                entries.append(entry)
            tables.append(DispatchTable(family, tuple(entries), count))
        if missing and require_tuned:
            some = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
            raise MissingRecordError(
                f"{len(missing)} of {len(missing) + len(used)} problems have no tuning record for {target}: {some}",
                remedy="gemmcache tune on that GPU, or build without --require-tuned",
            )
        tables.sort(key=lambda t: t.family.digest)
        return TargetPlan(
            target,
            tuple(tables),
            specs,
            _only({r.environment.driver for r in used}),
            _only({r.environment.cuda_runtime for r in used}),
        )

    def _spec(self, config: Config, family: ProblemFamily, target: Target) -> tuple[str, KernelSpec]:
        spec = self.families[config.kernel_family].spec(config, family, target)
        return kernel_digest(spec, self.toolchain, self.host), spec

    def _tuned(self, problem: Problem, target: Target, record: TuningRecord) -> tuple[Entry, KernelSpec | None]:
        library_us = record.library_us
        trial = self._usable(problem, target, record)
        if trial is None:
            entry = Entry(problem.m, LIBRARY, TUNED, record=record.digest, us=library_us, library_us=library_us)
            return entry, None
        digest, spec = self._spec(trial.config, problem.family, target)
        entry = Entry(problem.m, KERNEL, TUNED, digest, record.digest, trial.us, library_us, trial.error)
        return entry, spec

    def _usable(self, problem: Problem, target: Target, record: TuningRecord) -> Trial | None:
        """The record's winner; the next best that beat the library if the winner's kernels are not installed."""
        if record.winner is None:
            return None
        for trial in record.trials:
            family = self.families.get(trial.config.kernel_family)
            if trial.status != OK or trial.us >= record.library_us or family is None:
                continue
            if trial.config in family.configs(problem.family, target):
                return trial
        return None

    def _predicted(self, problem: Problem, target: Target, config: Config | None) -> tuple[Entry, KernelSpec | None]:
        if config is None:
            return Entry(problem.m, LIBRARY, PREDICTED), None
        digest, spec = self._spec(config, problem.family, target)
        return Entry(problem.m, KERNEL, PREDICTED, digest), spec


def _only(values: set[str | None]) -> str | None:
    return values.pop() if len(values) == 1 else None
