"""The exact torch reference of a family of problems, and the distance from it.

Operands are the logical views that `gemmcache.library` describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gemmcache.errors import UsageError
from gemmcache.library import GATE_ACTIVATION, activate, check_operands, library, library_op, scales_of
from gemmcache.problem import ProblemFamily

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["check_operands", "library", "library_op", "reference", "relative_error"]


def reference(
    family: ProblemFamily,
    a: Tensor,
    b: Tensor,
    operands: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """out [..., M, N'] of `family` before its final rounding, in `dtype`: float32 unless given, or float64.

    Raises `UsageError` for shapes or operand names that are not the family's.
    """
    import torch

    epilogue = family.epilogue
    check_operands(epilogue, a, b, operands)
    dtype = dtype or torch.float32
    # float32 operands would lose bits where the process allows TF32; products of shorter dtypes do not.
    wide = torch.float64 if torch.float32 in (a.dtype, b.dtype) else dtype
    acc = torch.matmul(a.to(wide), b.to(wide).mT).to(dtype)
    for scale in scales_of(epilogue, operands):
        acc = acc * scale.to(dtype)
    if epilogue.bias:
        acc = acc + operands["bias"].to(dtype)
    if epilogue.activation:
        acc = activate(epilogue.activation, acc)
    if epilogue.gate:
        gate, up = acc.chunk(2, dim=-1)
        acc = activate(GATE_ACTIVATION[epilogue.gate], gate) * up
    if epilogue.residual:
        acc = acc + float(epilogue.beta) * operands["residual"].to(dtype)
    return acc


def relative_error(out: Tensor, ref: Tensor) -> float:
    """||out - ref|| / ||ref|| (Frobenius norms, summed in float64) of two tensors of one shape.

    NaN and infinity count as equal where both sides have the same one, and give infinity where they do not.
    0 for two tensors of zeros or of no elements, infinity where only `ref` is all zeros. Raises `UsageError`
    for different shapes.
    """
    import torch

    if out.shape != ref.shape:
        raise UsageError(f"out is {list(out.shape)}, its reference {list(ref.shape)}")
    if ref.numel() == 0:
        return 0.0
    wide = torch.float64 if torch.float64 in (out.dtype, ref.dtype) else torch.float32
    x, y = out.to(wide), ref.to(wide)
    difference = x - y
    if not bool(torch.isfinite(difference).all()):
        same = (x == y) | (x.isnan() & y.isnan())
        difference = torch.where(same, 0.0, difference)
        if not bool(torch.isfinite(difference).all()):
            return float("inf")
        y = torch.where(torch.isfinite(y), y, 0.0)
    error = float(torch.linalg.vector_norm(difference, dtype=torch.float64))
    norm = float(torch.linalg.vector_norm(y, dtype=torch.float64))
    if norm == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / norm
