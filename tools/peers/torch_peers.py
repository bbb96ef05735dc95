"""The peers that come with torch: cuBLAS with and without fusion, and TorchInductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gemmcache import library
from gemmcache.epilogue import Epilogue
from gemmcache.problem import Problem, ProblemFamily
from tools.peers.interface import Call, Inputs, Peer

if TYPE_CHECKING:
    from torch import Tensor

_FLOATS = ("bfloat16", "float16", "float32")


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def _is_scaled_mm(family: ProblemFamily) -> bool:
    """Whether torch's scaled product of float8 operands is the way to write the family."""
    return (
        family.a_dtype == family.b_dtype == "float8_e4m3fn"
        and family.out_dtype == "bfloat16"
        and family.epilogue.scale in ("tensor", "row_column")
    )


def eager_flaw(family: ProblemFamily) -> str | None:
    """Why `eager_function` does not write that family, None if it does."""
    if _is_scaled_mm(family):
        return None
    if family.epilogue.scale:
        return f"no plain torch op scales {family.a_dtype} operands"
    if not family.a_dtype == family.b_dtype == family.out_dtype or family.a_dtype not in _FLOATS:
        return "operands and out have different dtypes"
    return None


def eager_function(family: ProblemFamily) -> Callable[..., Tensor]:
    """`f(a, b, bias=, residual=, scale_a=, scale_b=)`: a linear layer, then one torch op a step, as a model has it."""
    import torch
    import torch.nn.functional as F

    epilogue, scaled = family.epilogue, _is_scaled_mm(family)
    out_dtype, beta = _dtype(family.out_dtype), float(epilogue.beta)
    activations: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": F.relu,
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }
    activation = activations[epilogue.activation] if epilogue.activation else None
    gate = activations[library.GATE_ACTIVATION[epilogue.gate]] if epilogue.gate else None

    def eager(
        a: Tensor,
        b: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        scale_a: Tensor | None = None,
        scale_b: Tensor | None = None,
    ) -> Tensor:
        if scaled and scale_a is not None and scale_b is not None:
            value = torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=out_dtype)
            value = value if bias is None else value + bias
        else:
            value = F.linear(a, b, bias)
        if activation is not None:
            value = activation(value)
        if gate is not None:
            first, second = value.chunk(2, dim=-1)
            value = gate(first) * second
        if residual is not None:
            value = value + (residual if beta == 1.0 else beta * residual)
        return value

    return eager


class Cublas(Peer):
    """cuBLAS through torch, with the epilogue that cuBLASLt fuses: what gemmcache itself falls back to."""

    name = "cublas"
    packages = ("nvidia-cublas", "nvidia-cublas-cu12")

    def prepare(self, problem: Problem, inputs: Sequence[Inputs]) -> Call:
        family, compute = problem.family, library.library
        return lambda i: compute(family, i.a, i.b, i.operands, i.out)

    def host_call(self, problem: Problem, call: Call) -> Call:
        """Torch's own op where it is one op: the library's plan costs the host more than that."""
        return direct_op(problem.family) or call


def direct_op(family: ProblemFamily) -> Call | None:
    """The one torch op that computes the family with its epilogue; None where it takes several."""
    import torch

    e, addmm_activation = family.epilogue, torch._addmm_activation
    if _is_scaled_mm(family) and Epilogue(scale=e.scale) == e:
        return scaled_mm(family, fast=False)
    if eager_flaw(family) or _is_scaled_mm(family):
        return None
    if e in (Epilogue(), Epilogue(bias=True)):
        linear = torch.nn.functional.linear
        return (lambda i: linear(i.a, i.b, i.operands["bias"])) if e.bias else (lambda i: linear(i.a, i.b))
    if e.bias and e.activation in ("relu", "gelu_tanh") and not e.residual:
        gelu = e.activation == "gelu_tanh"
        return lambda i: addmm_activation(i.operands["bias"], i.a, i.b.t(), use_gelu=gelu)
    if Epilogue(residual=True, beta=e.beta) == e:
        beta = float(e.beta)
        return lambda i: torch.addmm(i.operands["residual"], i.a, i.b.t(), beta=beta)
    return None


def scaled_mm(family: ProblemFamily, fast: bool) -> Call:
    """torch's scaled product of float8 operands into out; `fast` accumulates with fewer bits."""
    import torch

    out_dtype = _dtype(family.out_dtype)

    def call(i: Inputs) -> Tensor:
        scales = i.operands["scale_a"], i.operands["scale_b"]
        return torch._scaled_mm(i.a, i.b.t(), *scales, out_dtype=out_dtype, use_fast_accum=fast, out=i.out)

    return call


class CublasFast(Peer):
    """cuBLAS on float8 operands with its fast accumulation."""

    name = "cublas-fast"
    packages = ("nvidia-cublas", "nvidia-cublas-cu12")

    def uncovered(self, problem: Problem) -> str | None:
        epilogue = problem.family.epilogue
        if _is_scaled_mm(problem.family) and Epilogue(scale=epilogue.scale) == epilogue:
            return None
        return "fast accumulation is for float8 operands with nothing but scales"

    def prepare(self, problem: Problem, inputs: Sequence[Inputs]) -> Call:
        return scaled_mm(problem.family, fast=True)


class Eager(Peer):
    """A linear layer, then one torch op for each step, as models are written."""

    name = "eager"
    packages = ("torch",)

    def uncovered(self, problem: Problem) -> str | None:
        epilogue = problem.family.epilogue
        if not (epilogue.activation or epilogue.gate or epilogue.residual):
            return "the same op as cublas"
        return eager_flaw(problem.family)

    def prepare(self, problem: Problem, inputs: Sequence[Inputs]) -> Call:
        eager = eager_function(problem.family)
        return lambda i: eager(i.a, i.b, **i.operands)


class Inductor(Peer):
    """torch.compile(mode="max-autotune-no-cudagraphs", dynamic=False) of the eager function."""

    name = "inductor"
    packages = ("triton",)

    def available(self) -> str | None:
        return None if find_spec("triton") else "triton is not installed"

    def uncovered(self, problem: Problem) -> str | None:
        return eager_flaw(problem.family)

    def prepare(self, problem: Problem, inputs: Sequence[Inputs]) -> Call:
        import torch

        # Every problem is a shape of the same code, and there is a limit to how many of those are compiled.
        torch._dynamo.reset()
        compiled = torch.compile(
            eager_function(problem.family), mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True
        )
        return lambda i: compiled(i.a, i.b, **i.operands)
