"""What a tensor must be like for a kernel: the limits that the compiled code declares, checked before it is called.

The exported code checks dtype, device and alignment itself, but M = 0 kills the process there, K = 0 leaves out
unwritten, and some strides get past it; nothing outside the limits may reach it.
"""

from __future__ import annotations

import torch

#: Operands of this many elements or more go to the library: kernels index tiles with 32 bits.
MAX_ELEMENTS = 1 << 31


def matrix_flaw(tensor: torch.Tensor, divisibility: int, align_bytes: int) -> str | None:
    """The name of the first limit that a 2-D operand breaks (a fallback counter's name), None if it keeps all.

    Rows must be contiguous, at least as far apart as they are long, and a multiple of `divisibility` elements apart.
    """
    rows, columns = tensor.shape
    row_stride, column_stride = tensor.stride()
    if column_stride != 1 or row_stride < columns:
        return "strides"
    if row_stride % divisibility:
        # One row is read at its beginning, but the descriptor takes its stride all the same.
        return "strides"
    if tensor.data_ptr() % align_bytes:
        return "alignment"
    if rows * row_stride >= MAX_ELEMENTS:
        return "size"
    return None


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether writing `tensor` (2-D, both sizes at least 1) could write an element twice."""
    strides = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    reach = 0
    for stride, size in strides:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
