"""What serves a problem that has no tuning record: the vote of its tuned neighbours, else the cost models'."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import exp, log, log2

from gemmcache.kernels.interface import Config, KernelFamily
from gemmcache.problem import Problem, ProblemFamily
from gemmcache.records.interface import OK, TuningRecord
from gemmcache.target import Target

# Chosen by the regret over the shipped H200 records, each predicted without its own family; see docs/measurements.md.
#: How far, in powers of two, a neighbour's m, n and k may be from the problem's, and how many are asked.
_REACH_M, _REACH_NK, _ASKED = 1.0, 2.0, 6
#: A factor of two in m changes the best config more than one in n or k.
_WEIGHT_M = 6.0
#: What a config gains over the library, as a logarithm: it was not among a neighbour's recorded trials if it gains less
#: than they by this much; and to be preferred to the library it must gain this much.
_UNSEEN, _NEEDED = 0.08, 0.02


class Predictor:
    """Predicts choices on one target from the records measured there, or on its siblings, and the cost models."""

    def __init__(self, records: Iterable[TuningRecord], families: Mapping[str, KernelFamily], target: Target) -> None:
        self.families, self.target = families, target
        #: Records by what neighbours have in common: those of this product, and of its siblings.
        self._own: dict[ProblemFamily, list[TuningRecord]] = {}
        self._siblings: dict[ProblemFamily, list[TuningRecord]] = {}
        for record in records:
            measured_on = record.environment.target
            if measured_on.is_sibling(target):
                layer = self._own if measured_on.key == target.key else self._siblings
                layer.setdefault(_kind(record.problem.family), []).append(record)

    def predict(self, problem: Problem) -> Config | None:
        """The config expected to serve `problem` best, None for the library (also if nothing computes it).

        The nearest tuned problems with the same dtypes, layouts and epilogue, within a factor of two in m and of four
        in n and k, vote by what each config gained over the library there: those measured on this product, else those
        on one of the same arch and SM count. Without any the config of the smallest estimate is taken.
        """
        neighbours = _nearest(problem, self._own) or _nearest(problem, self._siblings)
        if not neighbours:
            return cheapest(problem, self.target, self.families)
        gains = [(weight, _gains(record)) for weight, record in neighbours]
        told = [(weight, found, min(found.values()) - _UNSEEN) for weight, found in gains if found]
        valid = {c for name in self.families for c in self.families[name].configs(problem.family, self.target)}
        total = sum(weight for weight, _, _ in told)
        best: tuple[float, str, Config] | None = None
        for config in {c for _, found, _ in told for c in found} & valid:
            gain = sum(weight * found.get(config, unseen) for weight, found, unseen in told) / total
            vote = (-gain, str(config), config)
            best = vote if best is None else min(best, vote, key=lambda v: v[:2])
        return best[2] if best is not None and -best[0] > _NEEDED else None


def _nearest(problem: Problem, records: Mapping[ProblemFamily, list[TuningRecord]]) -> list[tuple[float, TuningRecord]]:
    """The nearest records with their weights, which fall with the distance from the nearest one."""
    family = problem.family
    near: list[tuple[float, TuningRecord]] = []
    for record in records.get(_kind(family), ()):
        other = record.problem.family
        m, n, k = (
            abs(log2(a / b)) for a, b in ((record.problem.m, problem.m), (other.n, family.n), (other.k, family.k))
        )
        if m <= _REACH_M and n <= _REACH_NK and k <= _REACH_NK:
            near.append((_WEIGHT_M * m + n + k, record))
    near.sort(key=lambda found: (found[0], found[1].digest))
    return [(exp(near[0][0] - distance), record) for distance, record in near[:_ASKED]]


def _kind(family: ProblemFamily) -> ProblemFamily:
    """What neighbours have in common: all but the sizes. Both are multiples of what a kernel may ask for."""
    return replace(family, n=1 << 12, k=1 << 12)


def _gains(record: TuningRecord) -> dict[Config, float]:
    return {t.config: log(record.library_us / t.us) for t in record.trials if t.status == OK and t.samples_us}


def cheapest(problem: Problem, target: Target, families: Mapping[str, KernelFamily]) -> Config | None:
    """The config that the cost models expect to be fastest, the simpler of equals; None if nothing computes it."""
    best: tuple[float, Config] | None = None
    for name in sorted(families):
        for config in families[name].configs(problem.family, target):
            us = families[name].estimate_us(config, problem, target)
            if best is None or us < best[0]:
                best = (us, config)
    return best[1] if best else None
