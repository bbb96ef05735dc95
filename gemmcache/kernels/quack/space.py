"""The configuration space for an arch, dtypes and epilogue; on sm_90a wider than what quack's own tuner searches.

Tiles are the kernel's own M x N x K; K is 128 or 256 bytes of operands. `swap_ab` computes `out.T = b @ a.T`: M runs
over the rows of the weight and N over the tokens, so that a small m fills a tile of 16 columns instead of 64 rows.
The space is all that `rules.invalid` lets through.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from gemmcache import dtypes
from gemmcache.kernels.interface import Config
from gemmcache.kernels.quack import rules
from gemmcache.problem import ProblemFamily

FAMILY = "quack"

#: Tokens of a swapped tile. Rows that a tile has and m lacks are not free: see docs/measurements.md.
_TOKENS = (16, 32, 48, 64, 80, 96, 112, 128)
#: (M, N) of cooperative tiles: all warp groups on one tile.
_COOPERATIVE = (
    *((m, n) for m in (64, 128) for n in _TOKENS),
    (128, 192), (128, 256), (256, 64), (256, 96), (256, 128), (256, 160), (256, 192), (192, 160), (320, 160),
)  # fmt: skip
#: (M, N) of pingpong tiles: two warp groups take turns.
_PINGPONG = (
    *((64, n) for n in (*_TOKENS, 192, 256)),
    *((128, n) for n in (*_TOKENS, 160, 192, 208)),
    (192, 128),
)
_CLUSTERS = ((1, 1), (2, 1), (1, 2))
_CLUSTERS_100 = ((1, 1), (2, 1), (1, 2), (2, 2))


def space(family: ProblemFamily, arch: str) -> tuple[Config, ...]:
    """Every valid config for `family` on `arch`, simplest first; none if the rules exclude it."""
    if rules.excluded(family, arch) is not None:
        return ()
    return _space(arch, dtypes.SIZES[family.a_dtype], bool(family.epilogue.gate), family.b_layout)


@lru_cache(maxsize=16)
def _space(arch: str, element_bytes: int, gate: bool, b_layout: str) -> tuple[Config, ...]:
    if arch == "sm_90a":
        return tuple(_sm90(element_bytes, gate, b_layout))
    return tuple(_sm100(gate) if arch == "sm_100a" else _sm120(gate, element_bytes))


def _sm90(element_bytes: int, gate: bool, b_layout: str) -> Iterator[Config]:
    """Simplest first: no swap, no cluster, shallow K."""
    for swap_ab in (False, True):
        for cluster in _CLUSTERS:
            for k in (128 // element_bytes, 256 // element_bytes):
                for pingpong, tiles in ((False, _COOPERATIVE), (True, _PINGPONG)):
                    for m, n in tiles:
                        reason = rules.invalid(
                            (m, n, k),
                            cluster,
                            pingpong,
                            swap_ab,
                            element_bytes=element_bytes,
                            gate=gate,
                            b_layout=b_layout,
                        )
                        if reason is None:
                            yield Config.of(
                                FAMILY,
                                kernel="sm90",
                                tile=(m, n, k),
                                cluster=cluster,
                                pingpong=pingpong,
                                swap_ab=swap_ab,
                                max_swizzle=8,
                            )


def _sm100(gate: bool) -> Iterator[Config]:
    """Tiles are M x N, K the class's own; `dynamic` takes tiles by cluster launch control as SMs get free."""
    for swap_ab in (False, True):
        for dynamic in (False, True):
            for cluster in _CLUSTERS_100:
                for tile in ((m, n) for m in (128, 256) for n in (16, 32, 64, 128, 192, 256)):
                    if rules.invalid_sm100(tile, cluster, swap_ab, gate=gate) is None:
                        yield Config.of(
                            FAMILY,
                            kernel="sm100",
                            tile=tile,
                            cluster=cluster,
                            dynamic=dynamic,
                            swap_ab=swap_ab,
                            max_swizzle=8,
                        )


def _sm120(gate: bool, element_bytes: int) -> Iterator[Config]:
    for swap_ab in (False, True):
        for pingpong in (False, True):
            for tile in ((128, 128), (128, 64), (64, 128), (128, 160), (128, 192)):
                if rules.invalid_sm120(tile, pingpong, swap_ab, gate=gate, element_bytes=element_bytes) is None:
                    yield Config.of(
                        FAMILY,
                        kernel="sm120",
                        tile=tile,
                        cluster=(1, 1),
                        pingpong=pingpong,
                        swap_ab=swap_ab,
                        max_swizzle=8,
                    )
