"""A roofline cost model over waves of tiles: good enough to order configs where nothing was measured.

The time is the larger of two: the waves' matrix work at the rate of the SMs that a wave keeps busy, and the bytes
through device memory at the bandwidth that those SMs can draw.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemmcache import dtypes
from gemmcache.problem import Problem
from gemmcache.target import Target


@dataclass(frozen=True, slots=True)
class Rates:
    """Sustained rates of one product: dense 16-bit matrix TFLOP/s and device memory TB/s."""

    tflops: float
    tbps: float


#: By product; others take the entry of the same arch with the figures scaled by SM count.
_RATES: dict[str, Rates] = {
    "NVIDIA A100": Rates(270, 1.7),
    "NVIDIA H100": Rates(700, 3.0),
    "NVIDIA H200": Rates(720, 4.3),
    "NVIDIA H20": Rates(140, 3.6),
    "NVIDIA B200": Rates(1600, 7.0),
    "NVIDIA GeForce RTX 5090": Rates(210, 1.6),
}
_BY_ARCH = {
    "sm_80": "NVIDIA A100",
    "sm_90a": "NVIDIA H100",
    "sm_100a": "NVIDIA B200",
    "sm_120a": "NVIDIA GeForce RTX 5090",
}
_SMS = {"NVIDIA A100": 108, "NVIDIA H100": 132, "NVIDIA B200": 148, "NVIDIA GeForce RTX 5090": 170}

# Fitted to the shipped H200 records by random search over the regret of the predicted config; see docs/measurements.md.
#: TB/s that one SM can draw from device memory if its stages held nothing but weights, and how the share of
#: weights in a stage counts.
_SM_TBPS, _SHARE_POWER = 0.2, 0.75
#: Fixed cost of a launch and of a tile in us, and the part of the shorter of compute and memory time that shows.
_LAUNCH_US, _TILE_US, _OVERLAP = 2.7, 0.8, 0.32
#: Elements of a tile over its half perimeter at which matrix work is no longer held up by shared memory.
_FULL_RATE_TILE = 65.0


def rates_of(target: Target) -> Rates:
    """Rates of the target's product, or of its arch scaled by the SM count."""
    if target.product in _RATES:
        return _RATES[target.product]
    like = _BY_ARCH.get(target.arch, "NVIDIA A100")
    scale = target.sm_count / _SMS[like]
    return Rates(_RATES[like].tflops * scale, _RATES[like].tbps * scale)


def tile_efficiency(tile_m: int, tile_n: int) -> float:
    """Share of the matrix rate that a tile reaches: operands of small tiles come from shared memory too often."""
    return min(1.0, tile_m * tile_n / (tile_m + tile_n) / _FULL_RATE_TILE)


def estimate_us(
    problem: Problem, target: Target, *, tile: tuple[int, int], cluster: tuple[int, int] = (1, 1), swap: bool = False
) -> float:
    """Microseconds for `problem` with CTA tiles of `tile` (the kernel's M x N) in clusters of `cluster` CTAs.

    With `swap` the kernel's M runs over the weight's rows and its N over the tokens.
    """
    rows, columns = (problem.family.n, problem.m) if swap else (problem.m, problem.family.n)
    weights, tokens = tile if swap else tile[::-1]
    # Whole clusters are launched, so a ragged edge costs up to a cluster of tiles.
    across = -(-rows // (tile[0] * cluster[0])) * cluster[0]
    down = -(-columns // (tile[1] * cluster[1])) * cluster[1]
    tiles = across * down * problem.family.batch
    waves = -(-tiles // target.sm_count)
    rates = rates_of(target)
    speed = 2.0 if dtypes.SIZES[problem.family.a_dtype] == 1 else 1.0
    sm_flops_per_us = rates.tflops * 1e6 * speed / target.sm_count * tile_efficiency(*tile)
    compute_us = waves * (2.0 * tile[0] * tile[1] * problem.family.k / sm_flops_per_us + _TILE_US)
    share: float = (weights / (weights + tokens)) ** _SHARE_POWER
    drawn = min(tiles, target.sm_count) * _SM_TBPS * share
    memory_us = problem.min_bytes / (min(rates.tbps, drawn) * 1e6)
    return _LAUNCH_US + max(compute_us, memory_us) + _OVERLAP * min(compute_us, memory_us)
