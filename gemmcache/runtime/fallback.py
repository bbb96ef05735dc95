"""What torch gives for a call, with autograd where it is on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.jit._trace import TracerWarning

from gemmcache import library
from gemmcache.errors import UsageError
from gemmcache.runtime.call import Form, Operands
from gemmcache.runtime.guards import as_matrix, is_tracing, is_watched, overlap
from gemmcache.runtime.kinds import PLAIN

_linear = torch.nn.functional.linear
_is_compiling = torch.compiler.is_compiling


def by_library(form: Form, operands: Operands) -> Tensor:
    """The result of a call of `form`: torch's own operators, on a CUDA device cuBLAS."""
    x, w, bias, residual, out, scale_a, scale_b = operands
    if form.linear:
        return _linear(x, w, bias)
    rows = (form.batch, form.m) if form.batched else (form.m,)
    given = {"bias": bias, "scale_a": scale_a, "scale_b": scale_b}
    tensors = {name: t if name == "bias" else t.reshape(-1) for name, t in given.items() if t is not None}
    if residual is not None:
        tensors["residual"] = residual.reshape(*rows, form.shape[-1])
    # Not in place where out is an operand too: the library may write while it still reads.
    target = None
    if out is not None and _is_apart(out, (x, w, bias, residual, scale_a, scale_b)):
        target = out if form.batched else as_matrix(out)
    result = library.library_op(form.epilogue, form.out_dtype, x.reshape(*rows, form.k), w, tensors, target)
    if out is None:
        return result.reshape(form.shape)
    return out if target is not None else out.copy_(result.reshape(out.shape))


def by_torch(
    operands: Operands,
    activation: str | None,
    gate: str | None,
    out_dtype: torch.dtype | None,
    count: Callable[[], object],
) -> Tensor:
    """`by_library` for a call that has no use for a bundle: nested operands, or while torch watches (`is_watched`).

    Calls `count` once the operands are found to fit. Raises `UsageError` as `Form.of` does, and for nested operands
    with more than a bias.
    """
    x, w, bias, *others = operands
    if getattr(x, "is_nested", False) or getattr(w, "is_nested", False):
        if any(word is not None for word in (activation, gate, out_dtype, *others)):
            raise UsageError("nested tensors take a bias and nothing else", remedy="apply the rest to the result")
        count()
        return _linear(x, w, bias)
    with warnings.catch_warnings() if is_tracing() else nullcontext():
        if is_tracing():
            # Sizes are tensors in a trace, which warns where they are compared: here they are only checked.
            warnings.simplefilter("ignore", TracerWarning)
        form = Form.of(operands, activation, gate, out_dtype)
        count()
        return by_library(form, operands)


def _is_apart(out: Tensor, read: tuple[Tensor | None, ...]) -> bool:
    """Whether `out` certainly shares no memory with what is `read`. What torch watches may have no address."""
    if _is_compiling() or is_watched() or any(t is not None and type(t) not in PLAIN for t in (out, *read)):
        return False
    return bool(out.numel()) and not overlap(out, read)
