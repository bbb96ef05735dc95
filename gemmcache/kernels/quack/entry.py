"""Jitted entries that bring quack's kernels to `(a[M, K], b[N, K], out[M, N], *bias[N], *residual[M, N])`.

The one place that knows quack's internals; each is named here and held by a test against the pinned version:
`gemm_default_epi.GemmDefaultSm90` and its `EpilogueArguments` (`mRowVecBroadcast`, `mColVecBroadcast`), its call
`(A, B, D, C, epilogue, scheduler, varlen, stream)` on 2-D tensors, and `tile_scheduler.TileSchedulerOptions`.

Importing this module imports quack and the compiler; only `QuackFamily.compile` does.
"""

import os
from typing import Any

# Read by quack and the DSL when there is no GPU to ask; quack's own cache stays out of the way.
os.environ.setdefault("QUACK_ARCH", "90")
os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
os.environ["QUACK_CACHE_ENABLED"] = "0"

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from quack.gemm_default_epi import GemmDefaultSm90  # noqa: E402
from quack.tile_scheduler import TileSchedulerOptions  # noqa: E402

from gemmcache.errors import UnsupportedError  # noqa: E402
from gemmcache.kernels.compiler import element_type  # noqa: E402
from gemmcache.kernels.interface import KernelSpec  # noqa: E402


def make_entry(spec: KernelSpec) -> Any:
    """The `cute.jit` function of `spec`: `(a, b, out, stream)`, with bias and residual before the stream if any."""
    config = spec.config
    cluster = config["cluster"]
    if spec.sm_count is None or not isinstance(cluster, tuple):
        raise UnsupportedError(f"{config} needs an SM count and a cluster")
    clusters = max(1, spec.sm_count // (cluster[0] * cluster[1]))
    swap_ab = bool(config["swap_ab"])
    dtype = element_type(spec.a_dtype)

    def run(a: Any, b: Any, out: Any, bias: Any, residual: Any, stream: Any) -> None:
        gemm = GemmDefaultSm90(cutlass.Float32, dtype, config["tile"], (*cluster, 1), pingpong=bool(config["pingpong"]))
        scheduler = TileSchedulerOptions(cutlass.Int32(clusters), max_swizzle_size=cutlass.Int32(config["max_swizzle"]))
        if swap_ab:
            # out.T = b @ a.T: what is a row vector of out is a column vector of out.T.
            epilogue = gemm.EpilogueArguments(mColVecBroadcast=bias)
            c = None if residual is None else _transposed(residual)
            gemm(b, a, _transposed(out), c, epilogue, scheduler, None, stream)
        else:
            epilogue = gemm.EpilogueArguments(mRowVecBroadcast=bias)
            gemm(a, b, out, residual, epilogue, scheduler, None, stream)

    return _ENTRIES[spec.epilogue](run)


def _transposed(tensor: cute.Tensor) -> Any:
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [1, 0]))


def _plain(run: Any) -> Any:
    @cute.jit  # type: ignore[untyped-decorator]
    def entry(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, stream: Any) -> None:
        run(a, b, out, None, None, stream)

    return entry


def _bias(run: Any) -> Any:
    @cute.jit  # type: ignore[untyped-decorator]
    def entry(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, bias: cute.Tensor, stream: Any) -> None:
        run(a, b, out, bias, None, stream)

    return entry


def _residual(run: Any) -> Any:
    @cute.jit  # type: ignore[untyped-decorator]
    def entry(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, residual: cute.Tensor, stream: Any) -> None:
        run(a, b, out, None, residual, stream)

    return entry


def _bias_residual(run: Any) -> Any:
    @cute.jit  # type: ignore[untyped-decorator]
    def entry(
        a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, bias: cute.Tensor, residual: cute.Tensor, stream: Any
    ) -> None:
        run(a, b, out, bias, residual, stream)

    return entry


_ENTRIES = {"none": _plain, "bias": _bias, "residual": _residual, "bias+residual": _bias_residual}
