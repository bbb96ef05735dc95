"""What a tensor must be like for a kernel: the limits that the compiled code declares, checked before it is called.

The exported code checks dtype, device and alignment itself, but M = 0 kills the process there, K = 0 leaves out
unwritten, and some strides get past it; nothing outside the limits may reach it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

#: Operands of this many elements or more go to the library: kernels index tiles with 32 bits.
MAX_ELEMENTS = 1 << 31


def matrix_flaw(tensor: torch.Tensor, divisibility: int) -> str | None:
    """The name of the first limit that a 2-D operand breaks (a fallback counter's name), None if it keeps all that
    its shape and strides tell. Rows must be contiguous, at least as far apart as they are long, and a multiple of
    `divisibility` elements apart.
    """
    rows, columns = tensor.shape
    row_stride, column_stride = tensor.stride()
    if column_stride != 1 or row_stride < columns:
        return "strides"
    if row_stride % divisibility:
        # One row is read at its beginning, but the descriptor takes its stride all the same.
        return "strides"
    if rows * row_stride >= MAX_ELEMENTS:
        return "size"
    return None


def vector_flaw(tensor: torch.Tensor) -> str | None:
    """`matrix_flaw` of a bias or of scales: as one dimension, the elements must have no gaps between them."""
    try:
        return "alignment" if tensor.view(-1).stride() != (1,) else None
    except RuntimeError:
        return "alignment"


def transposed(tensor: torch.Tensor) -> bool:
    """Whether columns, and not rows, of the last two dimensions are contiguous, as those of a transposed matrix."""
    rows, columns = tensor.shape[-2:]
    row_stride, column_stride = tensor.stride()[-2:]
    by_rows = column_stride == 1 and row_stride >= columns
    return row_stride == 1 and column_stride >= rows and not by_rows


#: The number of modes that see every operator (FakeTensorMode, make_fx), the innermost transform of torch.func, if
#: any, and whether torch.jit.trace is at work.
modes = torch._C._len_torch_dispatch_stack
transform = torch._C._functorch.peek_interpreter_stack
is_tracing = torch._C._is_tracing
_unpack_dual: Any = forward_ad.unpack_dual


def is_watched() -> bool:
    """Whether torch has to see each operator itself: it would not see what a kernel computes."""
    return bool(modes() or transform() or is_tracing())


def has_tangent(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether forward-mode differentiation goes through one of `tensors`."""
    if forward_ad._current_level < 0:
        return False
    return any(t is not None and _unpack_dual(t).tangent is not None for t in tensors)


def address_flaw(tensor: torch.Tensor, align: int) -> str | None:
    """The name of the limit that is broken by where a non-empty tensor lies, or by memory that isn't its value: that
    has none (a wrapper, a tensor of zeros without memory), or the value is the negative of it. Only complex tensors,
    which no kernel takes, can be conjugates. Raises `RuntimeError` for one without storage."""
    address = tensor.data_ptr()
    if not address or tensor.is_neg():
        return "subclass"
    return "alignment" if address % align else None


def as_matrix(tensor: torch.Tensor) -> torch.Tensor | None:
    """A 2-D view of `tensor` with its last dimension as columns, None if it has none."""
    if tensor.dim() == 2:
        return tensor
    try:
        return tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        return None


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of a tensor, and the one after its last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    # What is empty counts as contiguous.
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return start, start + (reach + 1) * tensor.element_size()


def overlap(one: torch.Tensor, others: Iterable[torch.Tensor | None]) -> bool:
    """Whether the address range of a tensor meets that of one of `others`; they may interleave without sharing an
    element. Storages tell nothing: several may lie in one allocation, as those of DLPack do."""
    first, end = _span(one)
    for other in others:
        if other is not None:
            a, b = _span(other)
            if max(first, a) < min(end, b):
                return True
    return False


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether writing `tensor` (2-D, both sizes at least 1) could write an element twice."""
    strides = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    reach = 0
    for stride, size in strides:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
