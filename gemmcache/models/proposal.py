"""The epilogue that can be fused into a GEMM, out of what the model does after it."""

from __future__ import annotations

from gemmcache.epilogue import Epilogue
from gemmcache.models.gemms import Gemm
from gemmcache.models.interface import COLUMN, ROW

#: Activation of the gate -> the gated epilogue that has it; no epilogue has another one.
_GATES = {"silu": "swiglu", "gelu": "geglu"}


def proposed(gemm: Gemm, way: str, tp: int) -> Epilogue:
    """The epilogue to fuse into `gemm`, its bias included, where `tp` ranks split it by `way`.

    Row-parallel ranks hold partial sums: all steps come after the reduction, the bias too. Column-parallel
    ranks hold some of out's columns, the residual has all of them. Experts and the language model's head
    have their bias only.
    """
    if way == ROW and tp > 1:
        return Epilogue()
    if gemm.is_head or gemm.is_expert:
        return Epilogue(bias=gemm.bias)
    after = gemm.after
    return Epilogue(
        bias=gemm.bias,
        activation=after.activation,
        gate=_GATES.get(after.gate or ""),
        residual=after.residual and not (way == COLUMN and tp > 1),
    )
