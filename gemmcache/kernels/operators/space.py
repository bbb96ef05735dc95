"""The configuration space for an arch, dtypes and with or without an epilogue: all that the rules let through.

Tiles are the kernel's own M x N. `swap_ab` computes `out.T = b @ a.T`: the kernel's M runs over the rows of the
weight and its N over the tokens, and out is written through a transposed view.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from gemmcache.kernels.interface import Config
from gemmcache.kernels.operators import rules
from gemmcache.problem import ProblemFamily

FAMILY = "operators"

_CLUSTERS_90 = ((1, 1), (2, 1), (1, 2), (2, 2))
_CLUSTERS_100 = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))
#: (preferred, fallback)
_CLUSTERS_PREFERRED = tuple((p, f) for p in ((2, 2), (4, 1), (4, 2), (4, 4)) for f in ((1, 1), (2, 1)))


def space(family: ProblemFamily, arch: str) -> tuple[Config, ...]:
    """Every valid config for `family` on `arch`, simplest first; none if the rules exclude it."""
    if rules.excluded(family, arch) is not None:
        return ()
    return _space(arch, family.a_dtype, family.out_dtype, bool(family.epilogue))


@lru_cache(maxsize=64)
def _space(arch: str, a_dtype: str, out_dtype: str, fused: bool) -> tuple[Config, ...]:
    if arch == "sm_80":
        return tuple(_sm80())
    if arch == "sm_90a":
        return tuple(_sm90())
    if fused:
        return tuple(_sm100_fused())
    return (*_sm100(), *_sm100_preferred(), *_sm100_tgv(a_dtype, out_dtype))


def _sm80() -> Iterator[Config]:
    """One tile: the kernel fixes 128x128x32 with four stages in its own source."""
    for swap in (False, True):
        yield Config.of(FAMILY, kernel="sm80", tile=(128, 128), swap_ab=swap)


def _sm90() -> Iterator[Config]:
    """`swizzle` groups tile columns for L2 reuse."""
    for tile in ((m, n) for m in (64, 128) for n in (64, 128, 256)):
        for cluster in _CLUSTERS_90:
            if rules.invalid_sm90(tile, cluster) is None:
                for swap in (False, True):
                    for swizzle in (1, 8):
                        yield Config.of(
                            FAMILY, kernel="sm90", tile=tile, cluster=cluster, swap_ab=swap, swizzle=swizzle
                        )


def _shapes_100() -> Iterator[tuple[bool, bool, tuple[int, int], tuple[int, int]]]:
    """(swap_ab, two_cta, tile, cluster) of the kernels with one cluster shape."""
    for swap in (False, True):
        for pair in (False, True):
            for tile in ((m, n) for m in (64, 128, 256) for n in (32, 64, 128, 256)):
                for cluster in _CLUSTERS_100:
                    if rules.invalid_sm100(tile, cluster, pair, swap) is None:
                        yield swap, pair, tile, cluster


def _sm100() -> Iterator[Config]:
    """The bare product; tiles are handed out in advance (`static`) or by the hardware (`clc`)."""
    for swap, pair, tile, cluster in _shapes_100():
        for scheduler in ("static", "clc"):
            yield Config.of(
                FAMILY,
                kernel="sm100",
                tile=tile,
                cluster=cluster,
                two_cta=pair,
                scheduler=scheduler,
                swap_ab=swap,
            )


def _sm100_fused() -> Iterator[Config]:
    """With an epilogue; always the static scheduler."""
    for swap, pair, tile, cluster in _shapes_100():
        yield Config.of(FAMILY, kernel="sm100_fused", tile=tile, cluster=cluster, two_cta=pair, swap_ab=swap)


def _sm100_preferred() -> Iterator[Config]:
    """Large clusters where they fit, clusters of `cluster` CTAs on the SMs that this leaves."""
    for pair in (False, True):
        for tile in ((m, n) for m in (128, 256) for n in (128, 256)):
            for preferred, fallback in _CLUSTERS_PREFERRED:
                for scheduler in ("static", "clc"):
                    if rules.invalid_preferred(tile, fallback, preferred, pair, scheduler) is None:
                        yield Config.of(
                            FAMILY,
                            kernel="sm100_preferred",
                            tile=tile,
                            cluster=fallback,
                            preferred_cluster=preferred,
                            two_cta=pair,
                            scheduler=scheduler,
                            swap_ab=False,
                        )


def _sm100_tgv(a_dtype: str, out_dtype: str) -> Iterator[Config]:
    """Low latency for few tokens: a block a tile, neither persistent nor clustered, out written without TMA."""
    for tile in ((64, n) for n in (8, 16, 32)):
        if rules.invalid_tgv(tile, a_dtype, out_dtype) is None:
            yield Config.of(FAMILY, kernel="sm100_tgv", tile=tile, stages=8, swap_ab=True)
