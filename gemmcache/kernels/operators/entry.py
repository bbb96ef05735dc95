"""Jitted entries that bring the operators' kernels to `(a[M, K], b[N, K], out[M, N], *epilogue tensors)`.

The kernel classes take a[M, K], b[K, N] and out[M, N] (a batch mode is added inside); the views that turn the
uniform operands into these are made inside the jitted entry and cost nothing at run time. The classes are called
directly: the operators' own `compile` asks the driver for cluster occupancy, which a machine without a GPU lacks.

Importing this module imports the compiler; only `OperatorsFamily.compile` does.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.operators.providers.cutedsl.evt.efc import create_named_epilogue
from cutlass.operators.providers.cutedsl.gemm.implementations import (
    sm80_tensorop_gemm_impl,
    sm90_static_persistent_impl,
    sm100_persistent_impl,
    sm100_persistent_preferred_cluster_impl,
    sm100_static_persistent_efc_impl,
    sm100_tgv_gemm_impl,
)

from gemmcache.epilogue import Epilogue
from gemmcache.errors import UnsupportedError
from gemmcache.kernels.compiler import element_type
from gemmcache.kernels.interface import KernelSpec

#: From the kernel's own (a[M, K], b[K, N], out[M, N], epilogue tensors, stream) to a launch.
Call = Callable[[Any, Any, Any, Sequence[Any], Any], None]


def make_entry(spec: KernelSpec) -> Any:
    """The `cute.jit` function of `spec`: `(a, b, out, *epilogue tensors, stream)`, these in the epilogue's order."""
    call = _CALLS[str(spec.config["kernel"])](spec)
    swap_ab = bool(spec.config["swap_ab"])
    names = Epilogue.parse(spec.epilogue).operands()

    def run(a: Any, b: Any, out: Any, operands: Sequence[Any], stream: Any) -> None:
        if swap_ab:
            turned = [_transposed(t) if name == "residual" else t for name, t in zip(names, operands, strict=True)]
            call(b, _transposed(a), _transposed(out), turned, stream)
        else:
            call(a, _transposed(b), out, operands, stream)

    @cute.jit  # type: ignore[untyped-decorator]
    def entry(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, *rest: Any) -> None:
        run(a, b, out, rest[:-1], rest[-1])

    return entry


def _transposed(tensor: cute.Tensor) -> Any:
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [1, 0]))


def _sm80(spec: KernelSpec) -> Call:
    dtype = element_type(spec.a_dtype)
    kernel = sm80_tensorop_gemm_impl.Sm80TensorOpGemmKernel(
        dtype, dtype, element_type(spec.out_dtype), element_type(spec.acc_dtype)
    )
    return lambda a, b, out, operands, stream: kernel(a, b, out, stream)


def _sm90(spec: KernelSpec) -> Call:
    config = spec.config
    kernel = sm90_static_persistent_impl.Sm90StaticPersistentGemmKernel(
        element_type(spec.acc_dtype), config["tile"], config["cluster"], swizzle_size=config["swizzle"]
    )
    clusters = _active_clusters(spec)
    return lambda a, b, out, operands, stream: kernel(a, b, out, clusters, stream)


def _sm100(spec: KernelSpec) -> Call:
    config = spec.config
    kinds = sm100_persistent_impl.PersistentTileSchedulerType
    static = config["scheduler"] == "static"
    kernel = sm100_persistent_impl.PersistentDenseGemmKernel(
        element_type(spec.acc_dtype),
        config["two_cta"],
        config["tile"],
        config["cluster"],
        True,
        kinds.STATIC_PERSISTENT if static else kinds.CLC,
        _identity,
    )
    clusters = _active_clusters(spec) if static else None
    return lambda a, b, out, operands, stream: kernel(a, b, out, stream, clusters, _identity)


def _sm100_preferred(spec: KernelSpec) -> Call:
    config = spec.config
    kernel = sm100_persistent_preferred_cluster_impl.PersistentDenseGemmPreferredClusterKernel(
        element_type(spec.acc_dtype),
        config["two_cta"],
        config["tile"],
        config["preferred_cluster"],
        config["cluster"],
        True,
        sm100_persistent_impl.PersistentTileSchedulerType.CLC,
        _identity,
    )
    # This scheduler has no use for the numbers of active clusters.
    return lambda a, b, out, operands, stream: kernel(a, b, out, None, None, stream, _identity)


def _sm100_tgv(spec: KernelSpec) -> Call:
    tile = spec.config["tile"]
    if not isinstance(tile, tuple):
        raise UnsupportedError(f"{spec.config} has no tile")
    kernel = sm100_tgv_gemm_impl.TgvGemmKernel(element_type(spec.acc_dtype), *tile, 128, spec.config["stages"])

    def batched(tensor: Any, modes: list[int]) -> Any:
        layout = cute.prepend(tensor.layout, cute.make_layout(1), up_to_rank=3)
        return cute.make_tensor(tensor.iterator, cute.select(layout, modes))

    def call(a: Any, b: Any, out: Any, operands: Sequence[Any], stream: Any) -> None:
        # It takes a[M, K, 1], b[N, K, 1] and out[M, N, 1].
        kernel(batched(a, [1, 2, 0]), batched(b, [2, 1, 0]), batched(out, [1, 2, 0]), stream)

    return call


def _sm100_fused(spec: KernelSpec) -> Call:
    config, epilogue = spec.config, Epilogue.parse(spec.epilogue)
    steps = _steps(epilogue, bool(config["swap_ab"]))
    kernel = sm100_static_persistent_efc_impl.PersistentDenseGemmEFCKernel(
        element_type(spec.acc_dtype),
        cutlass.Float32,
        config["two_cta"],
        config["tile"],
        config["cluster"],
        # The names are those of the tensors in the order of the call.
        create_named_epilogue(["efc_config", "out", *epilogue.operands()], steps),
    )
    clusters = _active_clusters(spec)

    def call(a: Any, b: Any, out: Any, operands: Sequence[Any], stream: Any) -> None:
        # Looks at which tensors the steps read and write; the launch relies on it.
        kernel.efc.compile(out, *operands)
        kernel(a, b, clusters, stream, out, *operands)

    return call


def _steps(epilogue: Epilogue, swap_ab: bool) -> Callable[..., None]:
    """`epilogue` in float32, rounded once when out is stored; called several times, to analyse and to emit code.

    In these calls values may be plain numbers, so only operators and functions of `efc` apply to them. All vectors
    come by TMA, which takes care of the edges of out.
    """

    def down(vector: Any) -> Any:
        """One value a row of out; with `swap_ab` the kernel's out is out.T."""
        return (vector.remap_modes[:, 0, :] if swap_ab else vector.remap_modes[0, :, :]).load()

    def along(vector: Any) -> Any:
        """One value a column of out."""
        return (vector.remap_modes[0, :, :] if swap_ab else vector.remap_modes[:, 0, :]).load()

    def everywhere(vector: Any) -> Any:
        return vector.remap_modes[:, :, :].load()

    per_tensor = epilogue.scale == "tensor"

    def steps(efc: Any, out: Any, *operands: Any) -> None:
        tensors = dict(zip(epilogue.operands(), operands, strict=True))
        value = efc.accum()
        if "scale_a" in tensors:
            value = value * (everywhere if per_tensor else down)(tensors["scale_a"])
        if "scale_b" in tensors:
            value = value * (everywhere if per_tensor else along)(tensors["scale_b"])
        if epilogue.bias:
            value = value + along(tensors["bias"])
        if epilogue.activation:
            value = _ACTIVATIONS[epilogue.activation](efc, value)
        if epilogue.residual:
            residual = tensors["residual"].load()
            value = value + (residual if epilogue.beta == "1" else residual * float(epilogue.beta))
        out.store(value)

    return steps


def _relu(efc: Any, x: Any) -> Any:
    # Not the maximum of x and 0: NaN stays NaN.
    return efc.where(x < 0.0, efc.full_like(x, 0.0), x)


def _gelu(efc: Any, x: Any) -> Any:
    # Not the gelu of `efc`, which is the tanh form in kernels and this one on a CPU.
    return x * 0.5 * (efc.erf(x * math.sqrt(0.5)) + 1.0)


def _gelu_tanh(efc: Any, x: Any) -> Any:
    return x * 0.5 * (efc.tanh((x + x * x * x * 0.044715) * math.sqrt(2.0 / math.pi)) + 1.0)


_ACTIVATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "relu": _relu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": lambda efc, x: efc.silu(x),
}

_CALLS: dict[str, Callable[[KernelSpec], Call]] = {
    "sm80": _sm80,
    "sm90": _sm90,
    "sm100": _sm100,
    "sm100_preferred": _sm100_preferred,
    "sm100_tgv": _sm100_tgv,
    "sm100_fused": _sm100_fused,
}


def _identity(x: Any) -> Any:
    return x


def _active_clusters(spec: KernelSpec) -> int:
    """Clusters that fill the GPU once; more than fit at a time only wait, so no occupancy query is needed."""
    cluster = spec.config["cluster"]
    if spec.sm_count is None or not isinstance(cluster, tuple):
        raise UnsupportedError(f"{spec.config} needs an SM count")
    return max(1, spec.sm_count // math.prod(cluster))
