"""What a call computes, as far as the shapes and dtypes of its tensors say: checked once, before anything runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gemmcache.dtypes import SIZES, accumulator_for
from gemmcache.epilogue import Epilogue
from gemmcache.errors import UsageError
from gemmcache.problem import ProblemFamily

_NAMES = {getattr(torch, name): name for name in SIZES}
#: Operands of these dtypes give bfloat16 unless another out is asked for.
_NARROW = frozenset(dtype for dtype, name in _NAMES.items() if SIZES[name] == 1)
_SINGLE = ((), (1,), (1, 1))


class Operands(NamedTuple):
    """The tensors of a call, as they were given. A tuple, since every call makes one."""

    x: Tensor
    w: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    out: Tensor | None = None
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """What calls with tensors of these shapes and dtypes compute.

    `m` is the number of rows of x, of one of `batch` products if w has three dimensions. `shape` is that of out.
    """

    epilogue: Epilogue
    m: int
    n: int
    k: int
    batch: int
    shape: tuple[int, ...]
    x_dtype: torch.dtype
    w_dtype: torch.dtype
    out_dtype: torch.dtype
    #: Whether w is [B, N, K] and x is [B, M, K].
    batched: bool
    #: Whether `torch.nn.functional.linear` is all that it takes; its result has the dtype that torch gives it.
    linear: bool

    @classmethod
    def of(
        cls, operands: Operands, activation: str | None, gate: str | None, out_dtype: torch.dtype | None = None
    ) -> Form:
        """Raises `UsageError` if the operands do not fit together, or for an unknown activation, gate or dtype."""
        _check_kinds(operands, out_dtype)
        x, w, bias, residual, out, scale_a, scale_b = operands
        lead = tuple(x.shape[:-1])
        batched = w.dim() == 3 and x.dim() == 3 and x.shape[0] == w.shape[0]
        if not x.dim() or not (batched or w.dim() == 2) or x.shape[-1] != w.shape[-1]:
            raise UsageError(
                f"x{list(x.shape)} and w{list(w.shape)} do not fit",
                remedy="x[..., K] and w[N, K], or x[B, M, K] and w[B, N, K]",
            )
        n, k = w.shape[-2:]
        m = lead[1] if batched else math.prod(lead)
        epilogue = Epilogue(
            scale=None if scale_a is None and scale_b is None else _scale_kind(scale_a, scale_b, lead, m, n),
            bias=bias is not None,
            activation=activation,
            gate=gate,
            residual=residual is not None,
        )
        shape = (*lead, epilogue.out_columns(n))
        for name, tensor, expected in (("bias", bias, (n,)), ("residual", residual, shape), ("out", out, shape)):
            if tensor is not None and tuple(tensor.shape) != expected:
                raise UsageError(f"{name}{list(tensor.shape)} does not fit, expected {list(expected)}")
        narrow = x.dtype in _NARROW or w.dtype in _NARROW
        plain = activation is None and gate is None and residual is None and out is None and epilogue.scale is None
        return cls(
            epilogue=epilogue,
            m=m,
            n=n,
            k=k,
            batch=w.shape[0] if batched else 1,
            shape=shape,
            x_dtype=x.dtype,
            w_dtype=w.dtype,
            out_dtype=_out_dtype(x, out, out_dtype),
            batched=batched,
            linear=plain and out_dtype is None and not narrow and not batched,
        )

    @property
    def empty(self) -> bool:
        return 0 in (self.m, self.n, self.k, self.batch)

    def family(self, a_layout: str = "mk", b_layout: str = "nk") -> ProblemFamily | None:
        """The family of problems of such calls; None for dtypes that problems do not have, and for empty operands."""
        a, b, out = (_NAMES.get(dtype) for dtype in (self.x_dtype, self.w_dtype, self.out_dtype))
        if a is None or b is None or out is None or self.empty:
            return None
        return ProblemFamily(
            n=self.n,
            k=self.k,
            a_dtype=a,
            b_dtype=b,
            out_dtype=out,
            acc_dtype=accumulator_for(a),
            batch=self.batch,
            a_layout=a_layout,
            b_layout=b_layout,
            epilogue=self.epilogue,
        )


def _check_kinds(operands: Operands, out_dtype: torch.dtype | None) -> None:
    for name, tensor in zip(operands._fields, operands, strict=True):
        if not isinstance(tensor, Tensor) and (tensor is not None or name in ("x", "w")):
            raise UsageError(f"{name} is {type(tensor).__name__}, not a tensor")
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise UsageError(f"out_dtype is {out_dtype!r}", remedy="for example torch.bfloat16")


def _out_dtype(x: Tensor, out: Tensor | None, asked: torch.dtype | None) -> torch.dtype:
    if asked is not None and out is not None and out.dtype != asked:
        raise UsageError(f"out has dtype {out.dtype}, not {asked}", remedy="give out or out_dtype, or both alike")
    if asked is None and out is None:
        return torch.bfloat16 if x.dtype in _NARROW else x.dtype
    return asked or out.dtype  # type: ignore[union-attr]


def _scale_kind(scale_a: Tensor | None, scale_b: Tensor | None, lead: tuple[int, ...], m: int, n: int) -> str:
    """The granularity of the scales by their shapes. x is [*lead, K], with m rows; w has n."""
    a, b = (None if scale is None else tuple(scale.shape) for scale in (scale_a, scale_b))
    rows = a in ((m,), (m, 1), lead, (*lead, 1)) if a is not None else False
    columns = b in ((n,), (1, n))
    if a in _SINGLE and b in _SINGLE and (n > 1 or not rows):
        return "tensor"
    if rows and columns:
        return "row_column"
    if rows and b is None:
        return "row"
    if columns and a is None:
        return "column"
    shown = " and ".join(f"{name}{list(s)}" for name, s in (("scale_a", a), ("scale_b", b)) if s is not None)
    raise UsageError(
        f"{shown} do not fit {m} rows of x and {n} of w",
        remedy="one element each; or one a row of x, one a row of w ([N] or [1, N]), or both",
    )
