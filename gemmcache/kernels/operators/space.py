"""The configuration space of each arch, with the validity rules that the kernels state or that compiling showed.

Tiles are the kernel's own M x N. `swap_ab` computes `out.T = b @ a.T`: the kernel's M runs over the rows of the
weight and its N over the tokens, and out is written through a transposed view.
"""

from __future__ import annotations

from collections.abc import Iterator

from gemmcache.kernels.interface import Config

FAMILY = "operators"

_CLUSTERS_90 = ((1, 1), (2, 1), (1, 2), (2, 2))
_CLUSTERS_100 = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))


def sm80() -> Iterator[Config]:
    """One tile: the kernel fixes 128x128x32 with four stages in its own source."""
    for swap in (False, True):
        yield Config.of(FAMILY, kernel="sm80", tile=(128, 128), swap_ab=swap)


def sm90() -> Iterator[Config]:
    """CTA tile M 64 or 128, N 64, 128 or 256, clusters up to 2x2; `swizzle` groups tile columns for L2 reuse."""
    for tile in ((m, n) for m in (64, 128) for n in (64, 128, 256)):
        for cluster in _CLUSTERS_90:
            for swap in (False, True):
                for swizzle in (1, 8):
                    yield Config.of(FAMILY, kernel="sm90", tile=tile, cluster=cluster, swap_ab=swap, swizzle=swizzle)


def sm100() -> Iterator[Config]:
    """MMA tile M 64/128 for one CTA, 128/256 for a pair; a pair needs an even cluster M. Static or CLC scheduler."""
    for pair in (False, True):
        for tile in ((m, n) for m in ((128, 256) if pair else (64, 128)) for n in (32, 64, 128, 256)):
            for cluster in _CLUSTERS_100:
                if pair and cluster[0] % 2:
                    continue
                for scheduler in ("static", "clc"):
                    yield Config.of(
                        FAMILY,
                        kernel="sm100",
                        tile=tile,
                        cluster=cluster,
                        two_cta=pair,
                        scheduler=scheduler,
                        swap_ab=False,
                    )


SPACES = {"sm_80": sm80, "sm_90a": sm90, "sm_100a": sm100}
