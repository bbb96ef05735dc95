"""What torch gives for a call, with autograd where it is on."""

from __future__ import annotations

import torch
from torch import Tensor

from gemmcache import library
from gemmcache.runtime.call import Form, Operands
from gemmcache.runtime.guards import as_matrix, overlap

_linear = torch.nn.functional.linear


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
    read = (x, w, bias, residual, scale_a, scale_b)
    apart = out is not None and out.numel() and not any(t is not None and overlap(out, t) for t in read)
    target = None
    if out is not None and apart:
        target = out if form.batched else as_matrix(out)
    result = library.library_op(form.epilogue, form.out_dtype, x.reshape(*rows, form.k), w, tensors, target)
    if out is None:
        return result.reshape(form.shape)
    return out if target is not None else out.copy_(result.reshape(out.shape))
