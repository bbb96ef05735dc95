"""What every source of problems gives: layers with their families of problems, and how often each m occurs."""

from __future__ import annotations

from dataclasses import dataclass

from gemmcache.ladder import DEFAULT_MS
from gemmcache.problem import Problem, ProblemFamily

#: How tensor parallelism splits a layer: the rows of the weight (column parallel), its columns, or not at all.
COLUMN, ROW, REPLICATED = "column", "row", "replicated"


@dataclass(frozen=True, slots=True)
class Layer:
    """A GEMM of the source: its module path (or definition's name), and how often one forward pass runs it.

    `path` has `*` for the layer index where `count` layers share one family. After a split by tensor
    parallelism `family` is one rank's.
    """

    path: str
    family: ProblemFamily
    count: int = 1
    parallel: str = REPLICATED


@dataclass(frozen=True, slots=True)
class Workload:
    """The GEMMs of one source. `m_weights` maps a family to its (m, weight) pairs, ascending in m, where the
    source knows traffic; families that it does not hold are tuned at `ladder`'s default ms."""

    name: str
    layers: tuple[Layer, ...]
    m_weights: tuple[tuple[ProblemFamily, tuple[tuple[int, float], ...]], ...] = ()

    def families(self) -> dict[ProblemFamily, int]:
        """Each family once, in order of appearance, with its count per forward pass."""
        counts: dict[ProblemFamily, int] = {}
        for layer in self.layers:
            counts[layer.family] = counts.get(layer.family, 0) + layer.count
        return counts

    def ms(self, family: ProblemFamily, override: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """The ms to tune `family` at: `override` if given, else the source's own, else powers of two to 8192."""
        if override:
            return override
        own = dict(self.m_weights).get(family)
        return tuple(m for m, _ in own) if own else DEFAULT_MS

    def problems(self, override: tuple[int, ...] | None = None) -> dict[Problem, float]:
        """Every problem with its weight: count times the m's share of the traffic (equal where unknown)."""
        weights: dict[Problem, float] = {}
        own = dict(self.m_weights)
        for family, count in self.families().items():
            shares = dict(own.get(family, ()))
            for m in self.ms(family, override):
                weights[family.at(m)] = count * (shares.get(m, 1.0) if shares else 1.0)
        return weights
