"""What a peer is, what it is given, and what came of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, ClassVar

from gemmcache.environment import package_version
from gemmcache.errors import ToolError
from gemmcache.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

#: The peer that all others are compared with, and ours.
BASELINE, OURS = "cublas", "gemmcache"

#: How a cell was timed: in a CUDA graph, or call by call between two events because it can't be captured.
GRAPH, EAGER_TIMED = "graph", "eager-timed"

#: What became of a peer on a problem. `UNCOVERED` includes peers that are not installed.
OK, WRONG, FAILED, TIMEOUT, UNCOVERED = "ok", "wrong", "failed", "timeout", "uncovered"


class PeerError(ToolError):
    """A peer could not do what it says it covers."""


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """One set of operands on a device: a[M, K], b[N, K], out[M, N'] and the epilogue's tensors by their names.

    `bias` is [N], `residual` [M, N']; scales are float32, (1, 1) per tensor, (M, 1) per row, (1, N) per column.
    """

    a: Tensor
    b: Tensor
    out: Tensor
    operands: Mapping[str, Tensor]


#: One launch on a set of inputs. Returns the result, which need not be `out`.
Call = Callable[[Inputs], "Tensor"]


class Peer(ABC):
    """One way to compute problems. Made without importing what it measures: `prepare` does that, so that its time
    includes it."""

    name: ClassVar[str]
    #: The pip packages that may bring it, the first that is installed gives the version that is reported.
    packages: ClassVar[tuple[str, ...]] = ()
    #: Whether it solves the very same problem, so that it may be called the best one.
    ranked: ClassVar[bool] = True

    def version(self) -> str | None:
        """The version of what is measured, None if it is unknown. Imports nothing."""
        return next((v for name in self.packages if (v := package_version(name))), None)

    def available(self) -> str | None:
        """Why it can't be used at all here, None if it can. Imports nothing."""
        return None

    def uncovered(self, problem: Problem) -> str | None:
        """Why it does not compute `problem`, None if it does."""
        return None

    @abstractmethod
    def prepare(self, problem: Problem, inputs: Sequence[Inputs]) -> Call | None:
        """Imports, tunes and compiles what `problem` needs. None where it finds only now that it can't."""

    def host_call(self, problem: Problem, call: Call) -> Call:
        """What a program that uses the peer would call, to time the host: `call` itself, or that without a layer
        which only the benchmark needs."""
        return call

    def comparable(self, problem: Problem, result: Tensor, inputs: Inputs) -> Tensor:
        """`result` as the problem defines it: for peers that leave a step of the epilogue out."""
        return result

    def note(self, problem: Problem) -> str:
        """A few words on what computed a problem that was prepared."""
        return ""


class Bench(ABC):
    """One problem with its inputs on one device. A test injects its own."""

    inputs: Sequence[Inputs]

    @abstractmethod
    def run(self, call: Call) -> Tensor:
        """The result of one call on the first set of inputs, waited for; `out` is filled with NaN before."""

    @abstractmethod
    def error(self, result: Tensor) -> float:
        """||result - ref|| / ||ref|| against the fp32 reference on the first set of inputs."""

    @abstractmethod
    def ready(self, name: str, call: Call) -> str:
        """Readies a call for timing under that name; returns `GRAPH` or `EAGER_TIMED`."""

    @abstractmethod
    def sample_us(self, name: str) -> float:
        """One timing: microseconds a launch, over inputs that rotate through more than the L2 cache."""

    @abstractmethod
    def host_us(self, call: Call, us: float) -> float:
        """Median host microseconds of a queued call; `us` is what it takes on the device."""

    @abstractmethod
    def check_device(self) -> None:
        """Raises `DeviceError` if the device's context is lost."""

    @abstractmethod
    def conditions(self) -> dict[str, float]:
        """Clocks in MHz, power in W, temperature in degrees C, as they are now; empty where unknown."""


@dataclass(slots=True)
class Cell:
    """What became of one peer on one problem. Times in microseconds, `cold_s` in seconds."""

    status: str
    detail: str = ""
    samples_us: list[float] = field(default_factory=list)
    mode: str = ""
    error: float | None = None
    #: Import, tuning, compilation and the first call.
    cold_s: float | None = None
    host_us: float | None = None

    @property
    def us(self) -> float | None:
        """Median microseconds; None without samples, or if they are of no use."""
        return median(self.samples_us) if self.samples_us and self.status in (OK, WRONG) else None

    @property
    def right_us(self) -> float | None:
        """Median microseconds if its numbers were right."""
        return self.us if self.status == OK else None


@dataclass(slots=True)
class Row:
    """One problem with a cell for each peer, by name."""

    problem: Problem
    cells: dict[str, Cell] = field(default_factory=dict)
    #: Peers that solve the very same problem.
    ranked: frozenset[str] = frozenset()
    #: Why nothing could be measured.
    failed: str = ""
    conditions: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def right_us(self, name: str) -> float | None:
        """Median microseconds of that peer if its numbers were right, and the row is complete."""
        cell = self.cells.get(name)
        return None if cell is None or self.failed else cell.right_us

    def x_baseline(self, name: str) -> float | None:
        """The baseline's time over that of the peer: above 1 is faster."""
        ours, base = self.right_us(name), self.right_us(BASELINE)
        return None if ours is None or base is None else base / ours

    def best_other(self) -> str | None:
        """The fastest peer with right numbers on the very same problem, ours left out."""
        times = {n: us for n in self.cells if n != OURS and n in self.ranked and (us := self.right_us(n)) is not None}
        return min(times, key=lambda n: times[n]) if times else None
