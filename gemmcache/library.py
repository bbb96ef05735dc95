"""How the library computes a family of problems: torch's own operators, on a CUDA device cuBLAS.

Operands are logical views: a is [M, K], b is [N, K] and out is [M, N'] with N' = N, or N/2 under a gate; a
batch goes in front of all three. A layout such as `km` is a matter of strides only. Epilogue tensors go by
the names of `Epilogue.operands`: `scale_a` and `scale_b` (one element per tensor; [M] or [M, 1] per row, [N]
or [1, N] per column), `bias` [N], `residual` of out's shape. All of a batch share scales and bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from gemmcache.epilogue import Epilogue
from gemmcache.errors import UsageError
from gemmcache.problem import ProblemFamily

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    #: From a tensor to write to, if any, to the value; it may write elsewhere all the same.
    Product = Callable[[Tensor | None], Tensor]
    #: The same, from the value so far to the next one.
    Stage = Callable[[Tensor, Tensor | None], Tensor]

GATE_ACTIVATION = {"swiglu": "silu", "geglu": "gelu"}


def check_operands(epilogue: Epilogue, a: Tensor, b: Tensor, operands: Mapping[str, Tensor]) -> None:
    """Raises `UsageError` unless `operands` are those of `epilogue` and all shapes agree."""
    if a.dim() < 2 or a.dim() != b.dim() or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-1]:
        raise UsageError(f"a {list(a.shape)} and b {list(b.shape)} are not [M, K] and [N, K]")
    if operands.keys() != set(epilogue.operands()):
        wanted = ", ".join(epilogue.operands()) or "no operands"
        raise UsageError(f"epilogue '{epilogue}' takes {wanted}, not {', '.join(sorted(operands)) or 'none'}")
    m, n = a.shape[-2], b.shape[-2]
    single = ((), (1,), (1, 1))
    tensor = epilogue.scale == "tensor"
    allowed: dict[str, tuple[tuple[int, ...], ...]] = {
        "scale_a": single if tensor else ((m,), (m, 1)),
        "scale_b": single if tensor else ((n,), (1, n)),
        "bias": ((n,),),
        "residual": (tuple(_out_shape(epilogue, a, b)),),
    }
    for name, operand in operands.items():
        if tuple(operand.shape) not in allowed[name]:
            shapes = " or ".join(str(list(shape)) for shape in allowed[name])
            raise UsageError(f"{name} is {list(operand.shape)}, not {shapes}")


def _out_shape(epilogue: Epilogue, a: Tensor, b: Tensor) -> torch.Size:
    import torch

    return torch.Size((*a.shape[:-1], epilogue.out_columns(b.shape[-2])))


def scales_of(epilogue: Epilogue, operands: Mapping[str, Tensor]) -> list[Tensor]:
    """The scales in shapes that broadcast over [..., M, N]."""
    per_tensor = epilogue.scale == "tensor"
    shapes = (("scale_a", (-1, 1)), ("scale_b", (1, -1)))
    return [operands[name].reshape((1, 1) if per_tensor else shape) for name, shape in shapes if name in operands]


def library(
    family: ProblemFamily, a: Tensor, b: Tensor, operands: Mapping[str, Tensor], out: Tensor | None = None
) -> Tensor:
    """`family` by torch in the operands' own dtypes: the baseline of tuning and the fallback of serving.

    On a CUDA device that is cuBLAS, with the epilogue that cuBLASLt fuses where torch offers it. Writes to
    `out` [..., M, N'] where given, and returns it; `residual` may be `out` itself. Raises `UsageError` for
    shapes, operand names or an out dtype that are not the family's.
    """
    import torch

    result = library_op(family.epilogue, getattr(torch, family.out_dtype), a, b, operands, out)
    if out is None and family.out_layout == "nm":
        return result.mT.contiguous().mT
    return result


def library_op(
    epilogue: Epilogue,
    out_dtype: torch.dtype,
    a: Tensor,
    b: Tensor,
    operands: Mapping[str, Tensor],
    out: Tensor | None = None,
) -> Tensor:
    """`library` for operands that no family describes, such as those with a dimension of 0."""
    check_operands(epilogue, a, b, operands)
    if out is not None and (out.dtype != out_dtype or out.shape != _out_shape(epilogue, a, b)):
        shape = list(_out_shape(epilogue, a, b))
        raise UsageError(f"out is {out.dtype} {list(out.shape)}, not {out_dtype} {shape}")
    product, stages = _plan(epilogue, out_dtype, a, b, operands)
    value = product(None if stages else out)
    for i, stage in enumerate(stages):
        # Only the last one writes to out: it may be the residual, which is read until then.
        last = i == len(stages) - 1 and value.dtype == out_dtype
        value = stage(value, out if last else None)
    if out is None:
        return value.to(out_dtype)
    if value is not out:
        out.copy_(value)
    return out


def _plan(
    epilogue: Epilogue, out_dtype: torch.dtype, a: Tensor, b: Tensor, operands: Mapping[str, Tensor]
) -> tuple[Product, list[Stage]]:
    """The product with all of the epilogue that torch fuses with it, and the stages that this leaves."""
    product: Product = partial(_product, a, b, out_dtype)
    scales = scales_of(epilogue, operands)
    bias, residual = operands.get("bias"), operands.get("residual")
    activation, beta = epilogue.activation, float(epilogue.beta)
    plain = a.dtype == b.dtype == out_dtype and out_dtype.is_floating_point and a.dim() == 2 and not scales
    # The scaled product has no derivative.
    if _scaled_mm_takes(epilogue, a, b, out_dtype) and not _wants_grad(a, b, *scales):
        product, scales = partial(_scaled_product, epilogue, a, b, out_dtype, scales), []
    elif plain and bias is not None and bias.dtype == out_dtype:
        if activation in ("relu", "gelu_tanh") and _fuses_activation(a, b, bias):
            product = partial(_linear_activation, activation, a, b, bias)
            activation = None
        else:
            product = partial(_linear, a, b, bias)
        bias = None
    elif (
        plain
        and residual is not None
        and residual.dtype == out_dtype
        and not (bias is not None or activation or epilogue.gate)
        and beta  # with a beta of 0 torch does not read the residual, not even its NaN
    ):
        product, residual = partial(_addmm, a, b, residual, beta), None
    stages: list[Stage] = [partial(_multiply, scale) for scale in scales]
    if bias is not None:
        stages.append(partial(_add, bias, 1.0))
    if activation:
        stages.append(partial(activate, activation))
    if epilogue.gate:
        stages.append(partial(_gated, GATE_ACTIVATION[epilogue.gate]))
    if residual is not None:
        stages.append(partial(_add, residual, beta))
    return product, stages


def _product(a: Tensor, b: Tensor, out_dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """a @ b.T with all the precision that torch gives these dtypes."""
    import torch

    if torch.int8 in (a.dtype, b.dtype):
        # float64 is exact here, and takes every shape, as torch._int_mm does not.
        return torch.matmul(a.to(torch.float64), b.to(torch.float64).mT)
    if a.dtype != b.dtype or a.dtype.itemsize == 1:
        short = out_dtype if out_dtype in (torch.bfloat16, torch.float16) else torch.float32
        # float16 has no room for the products of float8.
        common = torch.bfloat16 if short == torch.float16 and a.dtype.itemsize == 1 else short
        a, b = a.to(common), b.to(common)
    # This form of the product has no derivative.
    if out_dtype == torch.float32 and a.is_cuda and a.dim() == 2 and a.dtype.itemsize == 2 and not _wants_grad(a, b):
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    if out is not None and out.dtype == a.dtype:
        return torch.matmul(a, b.mT, out=out)
    return torch.matmul(a, b.mT)


def _scaled_mm_takes(epilogue: Epilogue, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether torch's scaled product of float8 operands takes these; its limits are cuBLASLt's."""
    import torch

    kinds = (torch.float8_e4m3fn, torch.float8_e5m2)
    return (
        a.is_cuda
        and a.dim() == 2
        and a.numel() > 0
        and a.dtype in kinds
        and b.dtype in kinds
        and torch.float8_e4m3fn in (a.dtype, b.dtype)
        and a.shape[1] % 16 == 0
        and b.shape[0] % 16 == 0
        and a.stride(1) == 1
        and b.stride(1) == 1
        # Row-wise scales give bfloat16 only.
        and (out_dtype == torch.bfloat16 or epilogue.scale in (None, "tensor"))
    )


def _scaled_product(
    epilogue: Epilogue, a: Tensor, b: Tensor, out_dtype: torch.dtype, scales: list[Tensor], out: Tensor | None
) -> Tensor:
    import torch

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.float32, device=a.device)

    given = [scale.to(torch.float32) for scale in scales]
    if epilogue.scale is None:
        given = [ones(1, 1), ones(1, 1)]
    elif epilogue.scale == "row":
        given = [*given, ones(1, b.shape[0])]
    elif epilogue.scale == "column":
        given = [ones(a.shape[0], 1), *given]
    scale_a, scale_b = given
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=out_dtype, out=out)


def _fuses_activation(*operands: Tensor) -> bool:
    """Whether torch's fused linear and activation serves: it has no derivative, and no CPU kernel."""
    return all(t.is_cuda and t.numel() for t in operands) and not _wants_grad(*operands)


def _wants_grad(*operands: Tensor) -> bool:
    import torch

    return torch.is_grad_enabled() and any(t.requires_grad for t in operands)


def _linear_activation(activation: str, a: Tensor, b: Tensor, bias: Tensor, out: Tensor | None) -> Tensor:
    import torch

    return torch._addmm_activation(bias, a, b.t(), use_gelu=activation == "gelu_tanh", out=out)


def _linear(a: Tensor, b: Tensor, bias: Tensor, out: Tensor | None) -> Tensor:
    import torch

    return torch.nn.functional.linear(a, b, bias) if out is None else torch.addmm(bias, a, b.t(), out=out)


def _addmm(a: Tensor, b: Tensor, residual: Tensor, beta: float, out: Tensor | None) -> Tensor:
    import torch

    return torch.addmm(residual, a, b.t(), beta=beta, out=out)


def _multiply(scale: Tensor, value: Tensor, out: Tensor | None) -> Tensor:
    import torch

    return torch.mul(value, scale, out=out)


def _add(other: Tensor, factor: float, value: Tensor, out: Tensor | None) -> Tensor:
    import torch

    return torch.add(value, other, alpha=factor, out=out)


def _gated(activation: str, value: Tensor, out: Tensor | None) -> Tensor:
    import torch

    gate, up = value.chunk(2, dim=-1)
    return torch.mul(activate(activation, gate), up, out=out)


def activate(activation: str, value: Tensor, out: Tensor | None = None) -> Tensor:
    """`activation` of `value`, into `out` (of the same dtype) where given."""
    import torch

    if activation == "relu":
        return torch.relu(value) if out is None else torch.clamp_min(value, 0, out=out)
    nn: Any = torch._C._nn  # its stubs leave out= away
    if activation == "silu":
        result: Tensor = nn.silu(value, out=out)
    else:
        result = nn.gelu(value, approximate="tanh" if activation == "gelu_tanh" else "none", out=out)
    return result
