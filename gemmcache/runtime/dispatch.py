"""From (family of problems, m) to what serves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gemmcache.bundle.interface import KERNEL, DispatchTable, Entry, Part
from gemmcache.ladder import INSIDE
from gemmcache.problem import ProblemFamily


@dataclass(frozen=True, slots=True)
class Choice:
    """What serves an m: `function` is a kernel's, or None for the library. `entry` is None for an m without one,
    then `where` says why (`below`, `between` or `above` the ladder, or `family` if nothing is known of the family)."""

    function: Callable[..., Any] | None
    entry: Entry | None
    where: str
    divisibility: int = 1
    align_bytes: int = 1


class Dispatcher:
    """The dispatch table of one family of problems, with its kernels' functions bound."""

    __slots__ = ("_choices", "_ladder", "_missing", "family", "table")

    def __init__(self, table: DispatchTable, kernels: Mapping[str, tuple[Callable[..., Any], int, int]]) -> None:
        self.family: ProblemFamily = table.family
        self.table = table
        self._ladder = table.ladder
        self._choices = [self._bind(entry, kernels) for entry in table.entries]
        self._missing = {where: Choice(None, None, where) for where in ("below", "between", "above")}

    @staticmethod
    def _bind(entry: Entry, kernels: Mapping[str, tuple[Callable[..., Any], int, int]]) -> Choice:
        if entry.choice != KERNEL or entry.kernel is None:
            return Choice(None, entry, INSIDE)
        function, divisibility, align = kernels[entry.kernel]
        return Choice(function, entry, INSIDE, divisibility, align)

    def choose(self, m: int) -> Choice:
        """What serves m >= 1 rows; the same for every rank and every call."""
        index, where = self._ladder.locate(m)
        return self._missing[where] if index is None else self._choices[index]


def bind_kernels(
    part: Part, function: Callable[[str], Callable[..., Any]]
) -> dict[str, tuple[Callable[..., Any], int, int]]:
    """(function, divisibility, alignment) of each kernel by digest; `function` looks a symbol up."""
    return {k.digest: (function(k.function), k.spec.divisibility, k.spec.align_bytes) for k in part.kernels}
