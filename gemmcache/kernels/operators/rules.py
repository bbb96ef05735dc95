"""Which problems the operators' kernels compute, and which combinations of parameters are valid, each with its reason.

This is the one place of the rules: `excluded` for families of problems, `invalid` for configs of a kernel. They are
what the kernel classes state, what compiling showed, and what the entry ABI and the dispatch tables need.
"""

from __future__ import annotations

from gemmcache import dtypes
from gemmcache.problem import ProblemFamily

#: Arches with kernels, and whether they take 8-bit operands and write other out dtypes; and fuse epilogues.
_MIXED = {"sm_80": False, "sm_90a": True, "sm_100a": True}
_FUSED = ("sm_100a",)

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
#: By the dtype of a and b: the out dtypes besides a's own, if that is one of 16 bits.
_OUTS = {
    "bfloat16": ("bfloat16", "float32"),
    "float16": ("float16", "float32"),
    **dict.fromkeys(_FLOAT8, ("bfloat16", "float16", "float32")),
    "int8": ("int32", "float32"),
}

Pair = tuple[int, int]


def divisibility_of(dtype: str) -> int:
    """Elements of `dtype` that n, k and row strides are multiples of: TMA takes strides of 16 bytes."""
    return 16 // dtypes.SIZES[dtype]


def excluded(family: ProblemFamily, arch: str) -> str | None:
    """Why no kernel computes `family` on `arch`, None if some do."""
    a, out, epilogue = family.a_dtype, family.out_dtype, family.epilogue
    mixed = _MIXED.get(arch, False)
    outs = _OUTS.get(a, ()) if mixed else (a,)
    limit = divisibility_of(a)
    layouts = (family.a_layout, family.b_layout, family.out_layout)
    rules = (
        (arch not in _MIXED, f"no kernels for {arch}"),
        (a != family.b_dtype, "a and b differ in dtype"),
        (a not in _OUTS or (a not in ("bfloat16", "float16") and not mixed), f"dtype {a}"),
        (out not in outs, f"out dtype {out} with a of {a}"),
        (family.acc_dtype != dtypes.accumulator_for(a), f"accumulator {family.acc_dtype}"),
        (family.batch != 1, "batched problems"),
        (layouts != ("mk", "nk", "mn"), "layouts other than mk,nk,mn"),
        (bool(epilogue) and arch not in _FUSED, f"epilogue {epilogue}: out is the bare product on {arch}"),
        (epilogue.gate is not None, f"epilogue {epilogue}: a gate joins columns of two tiles"),
        (
            epilogue.scale in ("row", "row_column"),
            f"epilogue {epilogue}: scale_a of rows starts anywhere, TMA at 16 bytes",
        ),
        (bool(epilogue) and out == "int32", f"epilogue {epilogue} with out int32: its steps are computed in float32"),
        (family.n % limit != 0 or family.k % limit != 0, f"n and k that are no multiples of {limit}"),
    )
    return next((reason for applies, reason in rules if applies), None)


def invalid_sm90(tile: Pair, cluster: Pair) -> str | None:
    """Why the sm_90a kernel does not take CTA tiles of M x N in clusters, None if it does."""
    rules = (
        (tile[0] not in (64, 128), "M of a tile is 64 or 128"),
        (tile[1] not in (64, 128, 256), "N of a tile is 64, 128 or 256"),
        (not _powers_of_two(cluster) or cluster[0] * cluster[1] > 4, "clusters are powers of 2, of 4 CTAs at most"),
    )
    return next((reason for applies, reason in rules if applies), None)


def invalid_sm100(tile: Pair, cluster: Pair, two_cta: bool, swap_ab: bool) -> str | None:
    """Why an sm_100a kernel does not take MMA tiles of M x N by one CTA or a pair, in clusters, None if it does."""
    rules = (
        (tile[0] not in ((128, 256) if two_cta else (64, 128)), "M of a tile is 64 or 128, for a pair 128 or 256"),
        (tile[1] not in range(32, 257, 32), "N of a tile is a multiple of 32, up to 256"),
        (two_cta and cluster[0] % 2 != 0, "a pair of CTAs needs an even cluster M"),
        (not _powers_of_two(cluster) or cluster[0] * cluster[1] > 16, "clusters are powers of 2, of 16 CTAs at most"),
        (swap_ab and tile[1] > 128, "more columns of tokens are as good as rows, without a swap"),
        (swap_ab and cluster[1] > 1, "few tokens make no two tiles along N"),
    )
    return next((reason for applies, reason in rules if applies), None)


def invalid_preferred(tile: Pair, fallback: Pair, preferred: Pair, two_cta: bool, scheduler: str) -> str | None:
    """Why the sm_100a kernel of two cluster shapes is not offered with these, None if it is."""
    rules = (
        (preferred == fallback, "two equal cluster shapes are one"),
        (preferred[0] % fallback[0] != 0 or preferred[1] % fallback[1] != 0, "one cluster holds whole other ones"),
        (scheduler == "static", "its grid is empty for fewer tiles than a preferred cluster, and each m is served"),
        (tile[0] < 128 or tile[1] < 128, "small tiles are for few tokens, which do not fill a preferred cluster"),
    )
    reason = next((reason for applies, reason in rules if applies), None)
    return reason or invalid_sm100(tile, fallback, two_cta, False) or invalid_sm100(tile, preferred, two_cta, False)


def invalid_tgv(tile: Pair, a_dtype: str, out_dtype: str) -> str | None:
    """Why the low-latency sm_100a kernel does not take tiles of weights x tokens and dtypes, None if it does."""
    rules = (
        (tile[0] != 64, "M of a tile is 64"),
        (tile[1] not in (8, 16, 32), "N of a tile is 8, 16 or 32"),
        (a_dtype == "int8", "it has floating-point operands only"),
        (out_dtype not in (a_dtype, "float32"), "out is of a's dtype or float32"),
    )
    return next((reason for applies, reason in rules if applies), None)


#: The low-latency kernel has a tile of tokens a block along the grid's second dimension, which has this many at most.
TGV_TOKEN_TILES = 65535


def _powers_of_two(sizes: Pair) -> bool:
    return all(size > 0 and size & (size - 1) == 0 for size in sizes)
