"""Calls of `bundle.linear` that come to a given problem, with random operands, and what they must give."""

from __future__ import annotations

from typing import Any

from gemmcache.dtypes import SIZES, accumulator_for
from gemmcache.problem import ProblemFamily
from gemmcache.reference import reference


def can_be_called(family: ProblemFamily) -> bool:
    """Whether some call comes to a problem of `family`: none has a factor on the residual, for one."""
    usual = family.epilogue.beta == "1" and family.out_layout == "mn"
    return usual and family.acc_dtype == accumulator_for(family.a_dtype)


def random(rows: int, columns: int, dtype: str, device: Any = "cpu", scale: float = 1.0, lead: tuple[int, ...] = ()):
    """[*lead, rows, columns] of normal values times `scale`, or of small integers."""
    import torch

    shape = (*lead, rows, columns)
    if dtype == "int8":
        return torch.randint(-8, 8, shape, dtype=torch.int8, device=device)
    return (torch.randn(shape, device=device) * scale).to(getattr(torch, dtype))


def matrix(rows: int, columns: int, dtype: str, by_columns: bool, **options: Any):
    """`random` with its rows contiguous, or its columns, which then are a multiple of 16 elements apart."""
    if not by_columns:
        return random(rows, columns, dtype, **options)
    return random(columns, -(-rows // 16) * 16, dtype, **options).mT[..., :rows, :]


def call_of(family: ProblemFamily, m: int, device: Any = "cpu") -> dict[str, Any]:
    """Arguments of a call that comes to `family` at `m`. Out has about unit variance, whatever k is, unless it is
    computed from integers."""
    import torch

    scale, lead = family.k**-0.25, (family.batch,) if family.batch > 1 else ()
    options: dict[str, Any] = {"device": device, "scale": scale, "lead": lead}
    call: dict[str, Any] = {
        "x": matrix(m, family.k, family.a_dtype, family.a_layout == "km", **options),
        "w": matrix(family.n, family.k, family.b_dtype, family.b_layout == "kn", **options),
        "activation": family.epilogue.activation,
        "gate": family.epilogue.gate,
        "out_dtype": getattr(torch, family.out_dtype),
    }
    single = family.epilogue.scale == "tensor"
    for name in family.epilogue.operands():
        if name == "bias":
            call[name] = random(1, family.n, family.out_dtype, device)[0]
        elif name == "residual":
            call[name] = random(m, family.out_columns, family.out_dtype, device, lead=lead)
        else:
            size = 1 if single else m if name == "scale_a" else family.n
            call[name] = torch.rand(size, device=device) + 0.5
    return call


def expected(family: ProblemFamily, call: dict[str, Any]):
    """What the call must give, in float32, up to rounding."""
    operands = {name: call[name] for name in family.epilogue.operands()}
    return reference(family, call["x"], call["w"], operands)


def limit_of(family: ProblemFamily) -> float:
    """The relative error that rounding out may make."""
    return 1e-2 if SIZES[family.out_dtype] > 1 else 5e-2
