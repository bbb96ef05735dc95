"""Epilogues of gemmcache on top of quack's kernels: scales, bias, activation, gate, residual, in this order.

quack composes an epilogue of operations that bring operands to the accumulator's registers (`quack.epilogue.ops`)
and one `epi_visit_subtile` that computes. The operations are quack's. The order of the steps is `gemmcache.epilogue`'s,
which differs from quack's own linear epilogue (a residual comes after the activation); the swapped gate is ours.

Importing this module imports quack and the compiler.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from quack import activation, layout_utils
from quack.cute_dsl_utils import mlir_namedtuple
from quack.epilogue.mixin import ComposableEpiMixin
from quack.epilogue.ops import ColVecLoad, EpiOp, RowVecLoad, Scalar, TileStore
from quack.rounding import RoundingMode

ACTIVATIONS = {
    "relu": activation.relu,
    "gelu": activation.gelu_erf,
    "gelu_tanh": activation.gelu_tanh_approx,
    "silu": activation.silu,
}
GATES = {"swiglu": activation.silu, "geglu": activation.gelu_erf}

#: Rows of a gate and of its up half that alternate in a swapped tile: a thread's accumulators hold rows r and r + 8.
GATE_ROWS = 8


class SwappedGateStore(EpiOp):  # type: ignore[misc]
    """Writes a gated tile of out.T from registers: the tile's rows alternate, `GATE_ROWS` of the gate, as many of up.

    The argument is out.T as [N/2, tokens]. The few tokens of swapped problems make too few bytes for staging to pay.
    """

    fn_port = None

    def param_fields(self) -> Any:
        return [(self.name, object, None)]

    def to_params(self, gemm: Any, args: Any) -> Any:
        return {self.name: getattr(args, self.name)}

    @cute.jit  # type: ignore[untyped-decorator]
    def begin(self, gemm: Any, param: Any, smem_tensor: Any, ctx: Any) -> Any:
        # Coordinates of this thread's accumulators in the tile, in the order in which it holds them.
        coords = ctx.partition_for_epilogue_fn(cute.make_identity_tensor((ctx.tile_M, ctx.tile_N)))
        if const_expr(ctx.tiled_copy_t2r is not None):
            coords = ctx.tiled_copy_r2s.retile(coords)
        row = ctx.tile_coord_mnkl[0] * (ctx.tile_M // 2)
        column = ctx.tile_coord_mnkl[1] * ctx.tile_N
        return [coords, row, column]

    @cute.jit  # type: ignore[untyped-decorator]
    def begin_loop(self, gemm: Any, state: Any, epi_coord: Any) -> Any:
        coords, row, column = state[0], state[1], state[2]
        return [cute.group_modes(coords, 3, cute.rank(coords))[None, None, None, epi_coord], row, column]


class GemmcacheEpilogue(ComposableEpiMixin):  # type: ignore[misc]
    """out = residual * beta + gate(activation(a @ b.T * scales + bias)); what is None is not compiled.

    Row and column are the kernel's own: they change places when operands are swapped. `epilogue_class` makes
    subclasses with the four class attributes set.
    """

    act: Any = None
    gate: Any = None
    swapped: bool = False
    beta: float = 1.0

    _epi_ops = (
        Scalar("scale_a", dtype=Float32),
        Scalar("scale_b", dtype=Float32),
        RowVecLoad("row_scale"),
        ColVecLoad("column_scale"),
        RowVecLoad("row_bias"),
        ColVecLoad("column_bias"),
        TileStore("gated", gated=True),
        SwappedGateStore("gated_transposed"),
    )
    _extra_param_fields = (
        ("split_k_semaphore", cute.Tensor | None, None),
        ("split_k_workspace", cute.Tensor | None, None),
    )

    @mlir_namedtuple
    class EpilogueArguments(NamedTuple):
        scale_a: cute.Pointer | None = None
        scale_b: cute.Pointer | None = None
        row_scale: cute.Tensor | None = None
        column_scale: cute.Tensor | None = None
        row_bias: cute.Tensor | None = None
        column_bias: cute.Tensor | None = None
        gated: cute.Tensor | None = None
        gated_transposed: cute.Tensor | None = None
        add_to_output: cutlass.Constexpr[bool] = False
        rounding_mode: cutlass.Constexpr[int] = RoundingMode.RN

    def epi_to_underlying_arguments(self, args: Any, *, loc: Any = None, ip: Any = None) -> Any:
        self.rounding_mode = args.rounding_mode
        values = self._epi_ops_to_params_dict(args)
        values["split_k_semaphore"] = values["split_k_workspace"] = None
        return self.EpilogueParams(**values)

    @cute.jit  # type: ignore[untyped-decorator]
    def epi_visit_subtile(self, params: Any, epi_loop_tensors: Any, tRS_rD: Any, tRS_rC: Any = None) -> Any:
        acc = tRS_rD
        scalars = [epi_loop_tensors[name] for name in ("scale_a", "scale_b") if name in epi_loop_tensors]
        factors = [epi_loop_tensors[name] for name in ("row_scale", "column_scale") if name in epi_loop_tensors]
        biases = [epi_loop_tensors[name] for name in ("row_bias", "column_bias") if name in epi_loop_tensors]
        for i in cutlass.range(cute.size(acc), unroll_full=True):
            x = acc[i]
            for scalar in scalars:
                x = x * scalar
            for factor in factors:
                x = x * factor[i]
            for bias in biases:
                x = x + bias[i]
            if const_expr(self.act is not None):
                x = self.act(x)
            if const_expr(tRS_rC is not None):
                residual = tRS_rC[i].to(Float32)
                if const_expr(self.beta != 1.0):
                    residual = residual * Float32(self.beta)
                x = x + residual
            acc[i] = x
        if const_expr(self.gate is None):
            return ()
        if const_expr(self.swapped):
            self._store_swapped_gate(params, epi_loop_tensors, acc)
            return ()
        # Adjacent columns hold a gate and its up half: `layout_utils.concat_to_interleave` of b.
        shape = cute.recast_layout(2, 1, acc.layout).shape
        out = cute.make_rmem_tensor(shape, Float32)
        pairs = cute.flat_divide(acc, cute.make_layout(2))
        gates, ups = pairs[0, ...], pairs[1, ...]
        for i in cutlass.range(cute.size(gates), unroll_full=True):
            out[i] = self.gate(gates[i]) * ups[i]
        return (out,)

    @cute.jit  # type: ignore[untyped-decorator]
    def _store_swapped_gate(self, params: Any, epi_loop_tensors: Any, acc: Any) -> None:
        coords, row, column = epi_loop_tensors["gated_transposed"]
        out = params.gated_transposed
        rows, columns = out.shape[0], out.shape[1]
        # In registers two columns of a row follow each other, then the same two of the row 8 below.
        for group in cutlass.range(cute.size(acc) // 4, unroll_full=True):
            for lane in cutlass.range(2, unroll_full=True):
                i = 4 * group + lane
                r, c = coords[i]
                to_row = row + (r // (2 * GATE_ROWS)) * GATE_ROWS + r % GATE_ROWS
                to_column = column + c
                if to_row < rows and to_column < columns:
                    out[to_row, to_column] = (self.gate(acc[i]) * acc[i + 2]).to(out.element_type)


def interleaved(tensor: Any) -> Any:
    """b[N, K] of a gate, or a vector [N], with the halves' rows alternating one by one."""
    return layout_utils.concat_to_interleave(tensor, 0)


def interleaved_by_rows(tensor: Any) -> Any:
    """b[N, K] of a gate, or a vector [N], with `GATE_ROWS` rows of its halves alternating."""
    half = cute.size(tensor, mode=[0]) // 2
    step = tensor.stride[0]
    rows, strides = (GATE_ROWS, 2, half // GATE_ROWS), (step, half * step, GATE_ROWS * step)
    layout = cute.make_layout((rows, *tensor.shape[1:]), stride=(strides, *tensor.stride[1:]))
    return cute.make_tensor(tensor.iterator, layout)


def epilogue_class(base: type, act: str | None, gate: str | None, swapped: bool, beta: float) -> Any:
    """A kernel class of quack, `base`, with this epilogue."""
    attributes = {
        "act": staticmethod(ACTIVATIONS[act]) if act else None,
        "gate": staticmethod(GATES[gate]) if gate else None,
        "swapped": swapped,
        "beta": beta,
    }
    return type(f"Gemmcache{base.__name__}", (GemmcacheEpilogue, base), attributes)
