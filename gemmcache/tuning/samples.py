"""Statistics of timing samples: which can be trusted, and how sure a difference is."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import median

from gemmcache.kernels.cost import rates_of
from gemmcache.problem import Problem
from gemmcache.target import Target

#: A sample this many times faster or slower than the median of its vector is an outlier.
_OUTLIER = 3.0
#: No kernel computes faster than this many times the sustained 16-bit matrix rate of its product: 8-bit operands
#: run at twice that rate, and the rest is room for error.
_RATE_MARGIN = 4.0


def floor_us(problem: Problem, target: Target) -> float:
    """A run time in microseconds that no correct kernel can undercut."""
    return problem.flops / (rates_of(target).tflops * 1e6 * _RATE_MARGIN)


def flaws(samples: Sequence[float], floor: float = 0.0) -> list[str]:
    """Why a sample vector can't be trusted; empty if it can. A broken timer gives zero, negative, NaN or
    impossibly short times; a few outliers are what medians are for, many are not."""
    found = []
    if not samples:
        return ["no samples"]
    if any(not math.isfinite(s) for s in samples):
        return ["a sample is not a finite number"]
    if any(s <= 0 for s in samples):
        return ["a sample is zero or negative"]
    middle = median(samples)
    if middle < floor:
        found.append(f"the median of {middle:.3f} us is below the possible {floor:.3f} us")
    far = outliers(samples)
    if len(far) * 4 > len(samples):
        found.append(f"{len(far)} of {len(samples)} samples are outliers")
    return found


def outliers(samples: Sequence[float]) -> list[int]:
    """Indices of samples more than a factor of three from the median."""
    middle = median(samples)
    return [i for i, s in enumerate(samples) if s * _OUTLIER < middle or s > _OUTLIER * middle]


def ratio_interval(
    numerator: Sequence[float], denominator: Sequence[float], *, rounds: int, seed: int, level: float = 0.90
) -> tuple[float, float]:
    """Bootstrap percentile interval of the median of the paired ratios numerator[i] / denominator[i].

    Percentile method: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13. The pairs come
    from the same round, so that drifting clocks cancel.
    """
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    generator = random.Random(seed)
    medians = sorted(median(generator.choices(ratios, k=len(ratios))) for _ in range(rounds))
    tail = (1.0 - level) / 2
    return medians[int(tail * (rounds - 1))], medians[math.ceil((1.0 - tail) * (rounds - 1))]
