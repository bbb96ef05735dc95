"""What quack's kernels compute here, and which configs: every exclusion with its reason, in one place."""

from __future__ import annotations

from gemmcache import dtypes
from gemmcache.epilogue import Epilogue
from gemmcache.problem import ProblemFamily

#: Where kernels are made for. The package has a class for sm_80 as well, which raises `NotImplementedError`.
ARCHES = ("sm_90a", "sm_100a", "sm_120a")

#: Dtypes of a and b, and the out dtypes that they may have.
_OUT_OF: dict[tuple[str, str], tuple[str, ...]] = {
    ("bfloat16", "bfloat16"): ("bfloat16", "float32"),
    ("float16", "float16"): ("float16", "float32"),
    **{(f"float8_{a}", f"float8_{b}"): ("bfloat16", "float16") for a in ("e4m3fn", "e5m2") for b in ("e4m3fn", "e5m2")},
}
#: Accumulators of one thread that fit twice: sums in fp8 are moved into others every few products, to keep precision.
_MAX_ACCUMULATORS_FP8 = 96


def excluded(family: ProblemFamily, arch: str) -> str | None:
    """Why no kernel computes `family` on `arch`; None if some do."""
    outs = _OUT_OF.get((family.a_dtype, family.b_dtype), ())
    layouts = (family.a_layout, family.b_layout, family.out_layout)
    k_major = 1 in (dtypes.SIZES[family.a_dtype], dtypes.SIZES[family.b_dtype])
    reasons = (
        (arch not in ARCHES, f"no kernels for {arch}"),
        (not outs, f"dtypes {family.a_dtype} and {family.b_dtype}"),
        (family.out_dtype not in outs, f"out dtype {family.out_dtype} of {family.a_dtype}"),
        (family.acc_dtype != "float32", f"accumulator {family.acc_dtype}"),
        (family.batch != 1, "batched problems"),
        (family.out_layout != "mn", "out layouts other than mn"),
        (k_major and layouts != ("mk", "nk", "mn"), "8-bit operands other than mk,nk"),
        (bool(family.epilogue.gate) and family.b_layout != "nk", "a gate with its pairs along contiguous memory"),
        (arch != "sm_90a" and layouts != ("mk", "nk", "mn"), f"layouts other than mk,nk,mn on {arch}: not verified"),
    )
    reason = next((text for applies, text in reasons if applies), None)
    if reason is None:
        reason = excluded_epilogue(family.epilogue, family.out_dtype)
    step = divisibility_of(family)
    if reason is None and (family.n % step or family.k % step):
        reason = f"n and k that are no multiples of {step}"
    return reason


def excluded_epilogue(epilogue: Epilogue, out_dtype: str) -> str | None:
    """Why no kernel has this epilogue; None if some do."""
    reasons = (
        (bool(epilogue.gate) and epilogue.residual, "a gate and a residual: the tiles of out and residual differ"),
        (bool(epilogue.gate) and epilogue.bias, "a gate and a bias: pairs of a 16-bit bias lie apart in memory"),
        (bool(epilogue.gate) and dtypes.SIZES[out_dtype] != 2, f"a gate with out dtype {out_dtype}"),
    )
    return next((text for applies, text in reasons if applies), None)


def divisibility_of(family: ProblemFamily) -> int:
    """What n and k are multiples of, in elements: 16 bytes of the operands; a gate halves n, and alternates 8 rows."""
    return max(16 // dtypes.SIZES[family.a_dtype], 16 if family.epilogue.gate else 8)


def invalid_sm100(tile: tuple[int, int], cluster: tuple[int, int], swap_ab: bool, *, gate: bool = False) -> str | None:
    """Why a combination is not in the space on sm_100a, None if it is. A tile of 256 rows is shared by two CTAs."""
    m, n = tile
    rules = (
        (m == 256 and cluster[0] % 2 != 0, "a pair of CTAs needs a cluster that is even along M"),
        (gate and swap_ab, "registers of one thread do not hold both rows of a pair"),
        (gate and n % 32 != 0, "half a gated tile is no multiple of the instruction's N"),
        (not swap_ab and n < 64, "small tiles are for few tokens, which want a swap of operands"),
        (swap_ab and n > 128, "as good without a swap, the order of tiles being chosen at run time"),
        (swap_ab and cluster[1] > 1, "few tokens make no two tiles along N"),
    )
    return next((reason for applies, reason in rules if applies), None)


def invalid_sm120(
    tile: tuple[int, int], pingpong: bool, swap_ab: bool, *, gate: bool = False, element_bytes: int = 2
) -> str | None:
    """Why a combination is not in the space on sm_120a, None if it is. There are no clusters of more than one CTA."""
    rules = (
        (pingpong and tile == (128, 192), "the accumulators of a pingpong tile spill"),
        (gate and swap_ab, "not verified on a device: which rows a thread holds"),
        (element_bytes == 1 and tile[1] > 128, "N of an 8-bit tile is 64 or 128"),
    )
    return next((reason for applies, reason in rules if applies), None)


def invalid(
    tile: tuple[int, int, int],
    cluster: tuple[int, int],
    pingpong: bool,
    swap_ab: bool,
    *,
    element_bytes: int = 2,
    gate: bool = False,
    b_layout: str = "nk",
) -> str | None:
    """Why a combination is not in the space, None if it is. Rules of the kernel class come first, then those that
    only keep out what can't win."""
    m, n, k = tile
    stage_bytes = (m + n) * k * element_bytes
    accumulators = m * n // (warp_groups(m, n, pingpong) * 128)
    fp8 = element_bytes == 1
    deep = k * element_bytes > 128
    splits_n = not pingpong and (m == 320 or (m == 192 and n > 128))
    rules = (
        (pingpong and n > {64: 256, 128: 208, 192: 128}.get(m, 0), "the accumulators of a pingpong tile spill"),
        (not pingpong and m == 320 and n > 160, "the accumulators of a tile of 320 rows spill"),
        (fp8 and accumulators > _MAX_ACCUMULATORS_FP8, "fp8 needs its accumulators twice, and they spill"),
        (n % 16 != 0 or (m in (192, 320) and not pingpong and n % 32 != 0), "N is no multiple of the instruction's"),
        (cluster[0] * cluster[1] > 4, "clusters of more than 4"),
        (3 * stage_bytes > 200_000, "fewer than three stages fit into shared memory"),
        (gate and not swap_ab and n % 32 != 0, "half a gated tile is no multiple of the instruction's N"),
        (gate and not swap_ab and splits_n, "a gate's pair may lie in two warp groups"),
        (
            b_layout == "kn" and not swap_ab and splits_n,
            "two warp groups share contiguous columns: the compiler aborts",
        ),
        (deep and not swap_ab, "a deep K only pays for the small tiles of few tokens"),
        (not swap_ab and m * n < 128 * 128, "small tiles are for few tokens, which want a swap of operands"),
        (swap_ab and n > 128, "as good without a swap, the order of tiles being chosen at run time"),
        (swap_ab and cluster == (1, 2), "few tokens make no two tiles along N"),
        (cluster != (1, 1) and m * n < 64 * 64, "multicast does not pay for small tiles"),
    )
    return next((reason for applies, reason in rules if applies), None)


def warp_groups(m: int, n: int, pingpong: bool) -> int:
    """Warp groups that share the accumulators of one tile, as the kernel class splits it."""
    if pingpong:
        return 1
    if m == 320:
        return 2
    if m == 192:
        return 3 if n <= 128 else 2
    return 2 if m >= 128 else 1
