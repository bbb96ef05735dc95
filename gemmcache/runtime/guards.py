"""What a tensor must be like for a kernel: the limits that the compiled code declares, checked before it is called.

The exported code checks dtype, device and alignment itself, but M = 0 kills the process there, K = 0 leaves out
unwritten, and some strides get past it; nothing outside the limits may reach it.
"""

from __future__ import annotations

import torch

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


def as_matrix(tensor: torch.Tensor) -> torch.Tensor | None:
    """A 2-D view of `tensor` with its last dimension as columns, None if it has none."""
    if tensor.dim() == 2:
        return tensor
    try:
        return tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        return None


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of a non-empty tensor, and the one after its last."""
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.element_size()


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the address ranges of two tensors meet; they may interleave without sharing an element."""
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr() or not (one.numel() and other.numel()):
        return False
    (a, b), (c, d) = _span(one), _span(other)
    return a < d and c < b


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether writing `tensor` (2-D, both sizes at least 1) could write an element twice."""
    strides = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    reach = 0
    for stride, size in strides:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
