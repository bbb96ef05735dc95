"""The configuration space on sm_90a, wider than the one that quack's own tuner searches.

Tiles are the kernel's own M x N x K; K is 64 or 128 elements of 16 bits. `swap_ab` computes `out.T = b @ a.T`: M runs
over the rows of the weight and N over the tokens, so that a small m fills a tile of 16 columns instead of 64 rows.
`invalid` states every rule with its reason; the space is all that it lets through.
"""

from __future__ import annotations

from collections.abc import Iterator

from gemmcache.kernels.interface import Config

FAMILY = "quack"

#: (M, N) of cooperative tiles: all warp groups on one tile.
_COOPERATIVE = (
    *((m, n) for m in (64, 128) for n in (16, 32, 64, 96, 128)),
    (128, 192), (128, 256), (256, 64), (256, 96), (256, 128), (256, 160), (256, 192), (192, 160), (320, 160),
)  # fmt: skip
#: (M, N) of pingpong tiles: two warp groups take turns.
_PINGPONG = (
    *((64, n) for n in (16, 32, 64, 96, 128, 256)),
    *((128, n) for n in (16, 32, 64, 96, 128, 160, 192, 208)),
    (192, 128),
)
_CLUSTERS = ((1, 1), (2, 1), (1, 2))


def invalid(tile: tuple[int, int, int], cluster: tuple[int, int], pingpong: bool, swap_ab: bool) -> str | None:
    """Why a combination is not in the space, None if it is. Rules of the kernel class come first, then those that
    only keep out what can't win."""
    m, n, k = tile
    stage_bytes = (m + n) * k * 2
    rules = (
        (pingpong and n > {64: 256, 128: 208, 192: 128}.get(m, 0), "the accumulators of a pingpong tile spill"),
        (not pingpong and m == 320 and n > 160, "the accumulators of a tile of 320 rows spill"),
        (n % 16 != 0 or (m in (192, 320) and not pingpong and n % 32 != 0), "N is no multiple of the instruction's"),
        (cluster[0] * cluster[1] > 4, "clusters of more than 4"),
        (3 * stage_bytes > 200_000, "fewer than three stages fit into shared memory"),
        (k == 128 and not swap_ab, "a deep K only pays for the small tiles of few tokens"),
        (not swap_ab and m * n < 128 * 128, "small tiles are for few tokens, which want a swap of operands"),
        (swap_ab and n > 128, "as good without a swap, the order of tiles being chosen at run time"),
        (swap_ab and cluster == (1, 2), "few tokens make no two tiles along N"),
        (cluster != (1, 1) and m * n < 64 * 64, "multicast does not pay for small tiles"),
    )
    return next((reason for applies, reason in rules if applies), None)


def sm90() -> Iterator[Config]:
    """Every valid config, simplest first: no swap, no cluster, shallow K."""
    for swap_ab in (False, True):
        for cluster in _CLUSTERS:
            for k in (64, 128):
                for pingpong, tiles in ((False, _COOPERATIVE), (True, _PINGPONG)):
                    for m, n in tiles:
                        if invalid((m, n, k), cluster, pingpong, swap_ab) is None:
                            yield Config.of(
                                FAMILY,
                                kernel="sm90",
                                tile=(m, n, k),
                                cluster=cluster,
                                pingpong=pingpong,
                                swap_ab=swap_ab,
                                max_swizzle=8,
                            )


SPACES = {"sm_90a": sm90}
