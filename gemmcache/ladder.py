"""The one rule from m to an entry of a dispatch table, used by tuner, builder and loader alike.

A ladder is the ascending list of the ms that were tuned. Entry i answers for the ms of its step::

    max(bound[i-1], bound[i] // 2, bound[i] - 16) < m <= bound[i]

so an m is rounded up to the next tuned point by at most 15 rows, and by less than a factor of two. An m that
falls in no step has no entry: it goes to the library and is counted. Nothing is extrapolated: on an H200 the
kernels tuned at 128 to 4096 took up to 1.6 times cuBLAS's time at ms far below, while a few rows of padding
cost nothing (docs/measurements.md). Whoever serves other ms often tunes at these.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from gemmcache.errors import UsageError

#: What a ladder is tuned at unless a source of problems says otherwise: powers of two, and up to 128, where kernels win
#: most, every multiple of the smallest tile of tokens, so that every m has an entry.
DEFAULT_MS: tuple[int, ...] = tuple(sorted({*(1 << i for i in range(14)), *range(16, 129, 16)}))

INSIDE, BELOW, BETWEEN, ABOVE = "inside", "below", "between", "above"

#: Rows by which an m is rounded up at most: less than the smallest tile of tokens.
MAX_PADDING = 15


def first_of_step(previous: int, bound: int) -> int:
    """The smallest m that the step ending at `bound` answers for; `previous` is the bound before, or 0."""
    return max(previous, bound // 2, bound - MAX_PADDING - 1) + 1


@dataclass(frozen=True, slots=True)
class Ladder:
    """Ascending tuned ms, at least one."""

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.bounds:
            raise UsageError("a ladder needs at least one m")
        if self.bounds[0] < 1 or any(a >= b for a, b in zip(self.bounds, self.bounds[1:], strict=False)):
            raise UsageError(f"ladder {list(self.bounds)} is not ascending and positive")

    @classmethod
    def of(cls, ms: Iterable[int]) -> Ladder:
        return cls(tuple(sorted(set(ms))))

    def locate(self, m: int) -> tuple[int | None, str]:
        """The entry's index and `inside`; or None and `below`, `between` or `above` for an m without an entry."""
        i = bisect_left(self.bounds, m)
        if i == len(self.bounds):
            return None, ABOVE
        previous = self.bounds[i - 1] if i else 0
        if m >= first_of_step(previous, self.bounds[i]):
            return i, INSIDE
        return None, BETWEEN if i else BELOW

    def steps(self) -> tuple[tuple[int, int], ...]:
        """(first m, last m) of each entry, both inclusive."""
        return tuple(
            (first_of_step(previous, bound), bound)
            for previous, bound in zip((0, *self.bounds), self.bounds, strict=False)
        )


def parse_ms(text: str) -> tuple[int, ...]:
    """Reads `1,2,4`, `1..8192` (powers of two between) or a mix; ascending and unique.

    Raises `UsageError` for anything else.
    """
    found: set[int] = set()
    for part in text.split(","):
        low, dots, high = part.strip().partition("..")
        try:
            first = int(low)
            last = int(high) if dots else first
        except ValueError:
            raise UsageError(f"'{part}' is not an m", remedy="for example 1,2,4 or 1..8192") from None
        if first < 1 or last < first:
            raise UsageError(f"'{part}' is not a range of ms", remedy="for example 1..8192")
        found.add(first)
        if dots:
            found.update(m for m in (1 << i for i in range(31)) if first <= m <= last)
            found.add(last)
    return tuple(sorted(found))
