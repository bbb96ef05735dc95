"""Counting what served each call, without a lock in the hot path."""

from __future__ import annotations

import itertools
import threading


class Tally:
    """A counter that threads may raise at the same time: `next` on an `itertools.count` is one atomic step."""

    __slots__ = ("_count", "_lock", "_reads", "hit")

    def __init__(self) -> None:
        self._count = itertools.count()
        self._reads = 0
        self._lock = threading.Lock()
        #: Raises the counter by one.
        self.hit = self._count.__next__

    @property
    def value(self) -> int:
        """How often `hit` was called. Reading draws a number too, which is subtracted again."""
        with self._lock:
            value = next(self._count) - self._reads
            self._reads += 1
            return value


#: Why a call that has an entry, or none, was served by the library.
MISSES = ("family", "below", "above")
FALLBACKS = (
    "empty",
    "subclass",
    "device",
    "batch",
    "dtype",
    "strides",
    "alignment",
    "divisibility",
    "size",
    "autograd",
    "autocast",
    "out",
)


class Counters:
    """What a bundle has served: `kernel` calls; `library` calls that the table itself gives to the library; `between`
    calls with an m between two tuned points, which the library serves; `miss_*` for families and ms that the bundle
    does not cover; `fallback_*` for operands outside a kernel's declared limits."""

    def __init__(self) -> None:
        self.kernel = Tally()
        self.library = Tally()
        self.between = Tally()
        self.misses = {name: Tally() for name in MISSES}
        self.fallbacks = {name: Tally() for name in FALLBACKS}

    def snapshot(self) -> dict[str, int]:
        """All counts by name. `calls` is their sum."""
        counts = {"kernel": self.kernel.value, "library": self.library.value, "between": self.between.value}
        counts.update({f"miss_{name}": tally.value for name, tally in self.misses.items()})
        counts.update({f"fallback_{name}": tally.value for name, tally in self.fallbacks.items()})
        return {"calls": sum(counts.values()), **counts}
