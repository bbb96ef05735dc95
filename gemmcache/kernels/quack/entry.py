"""Jitted entries that bring quack's kernels to the uniform ABI `(a[M, K], b[N, K], out[M, N'], *operands)`.

The one place, with `epilogue`, that knows quack's internals; each is named in these two modules and held by a test
against the pinned version: the classes `GemmSm90` (and its siblings), their call
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
from quack.gemm_sm90 import GemmSm90  # noqa: E402
from quack.gemm_sm100 import GemmSm100  # noqa: E402
from quack.gemm_sm120 import GemmSm120  # noqa: E402
from quack.tile_scheduler import TileSchedulerOptions  # noqa: E402

from gemmcache.epilogue import Epilogue  # noqa: E402
from gemmcache.errors import UnsupportedError  # noqa: E402
from gemmcache.kernels.compiler import element_type  # noqa: E402
from gemmcache.kernels.interface import KernelSpec  # noqa: E402
from gemmcache.kernels.quack.epilogue import epilogue_class, interleaved, interleaved_by_rows  # noqa: E402


def make_entry(spec: KernelSpec) -> Any:
    """The `cute.jit` function of `spec`: `(a, b, out, *operands, stream)`."""
    config = spec.config
    cluster = config["cluster"]
    if spec.sm_count is None or not isinstance(cluster, tuple):
        raise UnsupportedError(f"{config} needs an SM count and a cluster")
    clusters = max(1, spec.sm_count // (cluster[0] * cluster[1]))
    swap_ab = bool(config["swap_ab"])
    dtype = element_type(spec.a_dtype)
    epilogue = Epilogue.parse(spec.epilogue)
    names = epilogue.operands()
    base, options = _BASES[str(config["kernel"])]
    kernel_class = epilogue_class(base, epilogue.activation, epilogue.gate, swapped=swap_ab, beta=float(epilogue.beta))

    def run(a: Any, b: Any, out: Any, operands: tuple[Any, ...], stream: Any) -> None:
        chosen = {parameter: config[name] for parameter, name in options.items()}
        gemm = kernel_class(cutlass.Float32, dtype, config["tile"], (*cluster, 1), **chosen)
        scheduler = TileSchedulerOptions(cutlass.Int32(clusters), max_swizzle_size=cutlass.Int32(config["max_swizzle"]))
        given = dict(zip(names, operands, strict=True))
        c = given.pop("residual", None)
        arguments = _arguments(epilogue, given, swap_ab)
        d = out
        if epilogue.gate:
            alternate = interleaved_by_rows if swap_ab else interleaved
            along_n = "column_scale" if swap_ab else "row_scale"
            if along_n in arguments:
                arguments[along_n] = alternate(arguments[along_n])
            arguments["gated_transposed" if swap_ab else "gated"] = _transposed(out) if swap_ab else out
            b = alternate(b)
            d = None
        if swap_ab:
            # out.T = b @ a.T: what is a row vector of out is a column vector of out.T.
            c, d = (None if t is None else _transposed(t) for t in (c, d))
            gemm(b, a, d, c, gemm.EpilogueArguments(**arguments), scheduler, None, stream)
        else:
            gemm(a, b, d, c, gemm.EpilogueArguments(**arguments), scheduler, None, stream)

    return _ENTRIES[len(names)](run)


#: Kernel class by the `kernel` of a config, and which of its parameters the config gives by which name.
_BASES: dict[str, tuple[Any, dict[str, str]]] = {
    "sm90": (GemmSm90, {"pingpong": "pingpong"}),
    "sm100": (GemmSm100, {"use_clc_persistence": "dynamic"}),
    "sm120": (GemmSm120, {"pingpong": "pingpong"}),
}


def _arguments(epilogue: Epilogue, given: dict[str, Any], swap_ab: bool) -> dict[str, Any]:
    """The kernel's epilogue arguments for the operands of an epilogue, by their places in the kernel's own tile."""
    along_n, along_m = ("column", "row") if swap_ab else ("row", "column")
    places = {"bias": f"{along_n}_bias", "scale_a": f"{along_m}_scale", "scale_b": f"{along_n}_scale"}
    if epilogue.scale == "tensor":
        # A scalar operation reads through a pointer.
        places |= {"scale_a": "scale_a", "scale_b": "scale_b"}
        given = given | {name: given[name].iterator for name in ("scale_a", "scale_b")}
    return {places[name]: value for name, value in given.items()}


def _transposed(tensor: cute.Tensor) -> Any:
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [1, 0]))


def _no_operands(run: Any) -> Any:
    @cute.jit  # type: ignore[untyped-decorator]
    def entry(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, stream: Any) -> None:
        run(a, b, out, (), stream)

    return entry


def _one_operand(run: Any) -> Any:
    @cute.jit  # type: ignore[untyped-decorator]
    def entry(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, x: cute.Tensor, stream: Any) -> None:
        run(a, b, out, (x,), stream)

    return entry


def _two_operands(run: Any) -> Any:
    @cute.jit  # type: ignore[untyped-decorator]
    def entry(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, x: cute.Tensor, y: cute.Tensor, stream: Any) -> None:
        run(a, b, out, (x, y), stream)

    return entry


def _three_operands(run: Any) -> Any:
    @cute.jit  # type: ignore[untyped-decorator]
    def entry(
        a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, x: cute.Tensor, y: cute.Tensor, z: cute.Tensor, stream: Any
    ) -> None:
        run(a, b, out, (x, y, z), stream)

    return entry


def _four_operands(run: Any) -> Any:
    @cute.jit  # type: ignore[untyped-decorator]
    def entry(
        a: cute.Tensor,
        b: cute.Tensor,
        out: cute.Tensor,
        w: cute.Tensor,
        x: cute.Tensor,
        y: cute.Tensor,
        z: cute.Tensor,
        stream: Any,
    ) -> None:
        run(a, b, out, (w, x, y, z), stream)

    return entry


#: By the number of epilogue operands: a jitted function names its parameters.
_ENTRIES = (_no_operands, _one_operand, _two_operands, _three_operands, _four_operands)
