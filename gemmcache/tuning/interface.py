"""What tuning passes around: candidates, one problem opened on one device, and what came out of it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from gemmcache.kernels.interface import Config
from gemmcache.records.interface import Trial

#: Key of the baseline beside the candidates' kernel digests.
LIBRARY_KEY = "library"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A config on a problem, with the digest of its compiled kernel. `order` is its place in the family's space,
    where simpler configs come first."""

    config: Config
    kernel: str
    order: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one problem's measurement gave: every trial of the finals, and those that were wrong or failed before.

    `contenders` are the configs that met the library in the decision rounds, the challenger first. Their
    `samples_us` and `baseline_us` are paired: sample i of each was taken in round i of the decision.
    """

    trials: tuple[Trial, ...]
    contenders: tuple[Config, ...]
    baseline_us: tuple[float, ...]
    conditions: tuple[tuple[str, float], ...]
    screened: int


class ProblemBench(ABC):
    """One problem with its inputs on one device. Keys are kernel digests, or `LIBRARY_KEY`.

    `prepare`, `sample_us` and `error` raise `MeasurementError` for a candidate that fails and leaves the device
    usable, `DeviceError` where the device's context is lost.
    """

    @abstractmethod
    def prepare(self, key: str) -> None:
        """Runs the candidate once and readies it for timing."""

    @abstractmethod
    def sample_us(self, key: str) -> float:
        """One timing: microseconds a launch, over inputs that rotate through more than the L2 cache."""

    def rest(self, seconds: float) -> None:
        """Leaves the device idle."""
        time.sleep(seconds)

    @abstractmethod
    def error(self, key: str) -> float:
        """The largest relative error ||out - ref|| / ||ref|| against an fp32 reference, at m and its ragged
        neighbours; infinity if any element was left unwritten."""

    @abstractmethod
    def conditions(self) -> dict[str, float]:
        """Clocks in MHz, power in W, temperature in degrees C and the like, as they are now."""

    @abstractmethod
    def release(self, key: str) -> None:
        """Frees what `prepare` made for a candidate that is out of the race."""
