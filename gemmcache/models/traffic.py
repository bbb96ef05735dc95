"""How often each m occurs for each family of problems, collected and turned into shares."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from gemmcache.problem import ProblemFamily


class Traffic:
    """Weights of ms by family, added up over the entries of a source."""

    def __init__(self) -> None:
        self._weights: dict[ProblemFamily, dict[int, float]] = defaultdict(lambda: defaultdict(float))

    def add(self, family: ProblemFamily, weights: Mapping[int, float]) -> None:
        """Adds m -> weight (any positive scale, the same for all entries of a family) to `family`."""
        for m, weight in weights.items():
            self._weights[family][m] += weight

    def shares(self) -> tuple[tuple[ProblemFamily, tuple[tuple[int, float], ...]], ...]:
        """(family, ((m, share), ...)) in order of first appearance, ms ascending, shares with a sum of 1."""
        result = []
        for family, weights in self._weights.items():
            total = sum(weights.values())
            result.append((family, tuple((m, weights[m] / total) for m in sorted(weights))))
        return tuple(result)
