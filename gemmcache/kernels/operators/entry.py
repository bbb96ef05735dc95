"""Jitted entries that bring the operators' kernels to `(a[M, K], b[N, K], out[M, N])`.

The kernel classes take a[M, K], b[K, N] and out[M, N] (a batch mode is added inside); the views that turn the
uniform operands into these are made inside the jitted entry and cost nothing at run time. The classes are called
directly: the operators' own `compile` asks the driver for cluster occupancy, which a machine without a GPU lacks.

Importing this module imports the compiler; only `OperatorsFamily.compile` does.
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.operators.providers.cutedsl.gemm.implementations import (
    sm80_tensorop_gemm_impl,
    sm90_static_persistent_impl,
    sm100_persistent_impl,
)

from gemmcache.errors import UnsupportedError
from gemmcache.kernels.compiler import element_type
from gemmcache.kernels.interface import KernelSpec


def make_entry(spec: KernelSpec) -> Any:
    """The `cute.jit` function `(a, b, out, stream)` for `spec`."""
    call = _CALLS[str(spec.config["kernel"])](spec)
    swap_ab = bool(spec.config["swap_ab"])

    @cute.jit  # type: ignore[untyped-decorator]
    def entry(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, stream: Any) -> None:
        if cutlass.const_expr(swap_ab):
            call(b, _transposed(a), _transposed(out), stream)
        else:
            call(a, _transposed(b), out, stream)

    return entry


def _transposed(tensor: cute.Tensor) -> Any:
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [1, 0]))


def _sm80(spec: KernelSpec) -> Any:
    dtype = element_type(spec.a_dtype)
    return sm80_tensorop_gemm_impl.Sm80TensorOpGemmKernel(dtype, dtype, element_type(spec.out_dtype), cutlass.Float32)


def _sm90(spec: KernelSpec) -> Any:
    config = spec.config
    kernel = sm90_static_persistent_impl.Sm90StaticPersistentGemmKernel(
        cutlass.Float32, config["tile"], config["cluster"], swizzle_size=config["swizzle"]
    )
    clusters = _active_clusters(spec)
    return lambda a, b, out, stream: kernel(a, b, out, clusters, stream)


def _sm100(spec: KernelSpec) -> Any:
    config = spec.config
    kinds = sm100_persistent_impl.PersistentTileSchedulerType
    static = config["scheduler"] == "static"
    kernel = sm100_persistent_impl.PersistentDenseGemmKernel(
        cutlass.Float32,
        config["two_cta"],
        config["tile"],
        config["cluster"],
        True,
        kinds.STATIC_PERSISTENT if static else kinds.CLC,
        _identity,
    )
    clusters = _active_clusters(spec) if static else None
    return lambda a, b, out, stream: kernel(a, b, out, stream, clusters, _identity)


_CALLS = {"sm80": _sm80, "sm90": _sm90, "sm100": _sm100}


def _identity(x: Any) -> Any:
    return x


def _active_clusters(spec: KernelSpec) -> int:
    """Clusters that fill the GPU once; more than fit at a time only wait, so no occupancy query is needed."""
    cluster = spec.config["cluster"]
    if spec.sm_count is None or not isinstance(cluster, tuple):
        raise UnsupportedError(f"{spec.config} needs an SM count")
    return max(1, spec.sm_count // math.prod(cluster))
