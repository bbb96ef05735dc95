"""What serves a problem that has no tuning record: its nearest tuned neighbour's choice, else the cost models'."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import log2

from gemmcache.kernels.interface import Config, KernelFamily
from gemmcache.problem import Problem
from gemmcache.records.interface import TuningRecord
from gemmcache.target import Target

#: How far, in powers of two, a neighbour's m, n and k may be from the problem's.
_REACH_M, _REACH_NK = 1.0, 2.0
#: A factor of two in m changes the best config more than one in n or k.
_WEIGHT_M = 3.0


class Predictor:
    """Predicts choices on one target from the records measured there and the families' cost models."""

    def __init__(self, records: Iterable[TuningRecord], families: Mapping[str, KernelFamily], target: Target) -> None:
        self.families, self.target = families, target
        self._records = [r for r in records if r.environment.target.key == target.key]

    def predict(self, problem: Problem) -> Config | None:
        """The config expected to serve `problem` best, None for the library (also if nothing computes it).

        A tuned neighbour with the same dtypes, layouts and epilogue within a factor of two in m and of four in n and
        k decides; without one the config of the smallest estimate does.
        """
        neighbour = self._nearest(problem)
        if neighbour is not None:
            if neighbour.winner is None:
                return None
            config = neighbour.winner.config
            if config in self._configs(config.kernel_family, problem):
                return config
        return cheapest(problem, self.target, self.families)

    def _configs(self, family: str, problem: Problem) -> list[Config]:
        known = self.families.get(family)
        return list(known.configs(problem.family, self.target)) if known else []

    def _nearest(self, problem: Problem) -> TuningRecord | None:
        best: tuple[float, TuningRecord] | None = None
        family = problem.family
        for record in self._records:
            other = record.problem.family
            if replace(other, n=family.n, k=family.k) != family:
                continue
            m, n, k = (
                abs(log2(a / b)) for a, b in ((record.problem.m, problem.m), (other.n, family.n), (other.k, family.k))
            )
            if m > _REACH_M or n > _REACH_NK or k > _REACH_NK:
                continue
            distance = _WEIGHT_M * m + n + k
            if best is None or distance < best[0]:
                best = (distance, record)
        return best[1] if best else None


def cheapest(problem: Problem, target: Target, families: Mapping[str, KernelFamily]) -> Config | None:
    """The config that the cost models expect to be fastest, the simpler of equals; None if nothing computes it."""
    best: tuple[float, Config] | None = None
    for name in sorted(families):
        for config in families[name].configs(problem.family, target):
            us = families[name].estimate_us(config, problem, target)
            if best is None or us < best[0]:
                best = (us, config)
    return best[1] if best else None
