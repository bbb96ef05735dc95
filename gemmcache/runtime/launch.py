"""From a call's operands to a kernel's arguments: `(a[M, K], b[N, K], out[M, N'], *epilogue tensors)`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gemmcache.problem import ProblemFamily
from gemmcache.runtime.call import Form, Operands
from gemmcache.runtime.dispatch import Choice
from gemmcache.runtime.guards import (
    MAX_ELEMENTS,
    address_flaw,
    as_matrix,
    matrix_flaw,
    overlap,
    overlaps_itself,
    transposed,
    vector_flaw,
)

Shape = tuple[int, ...]

#: Scales of rows and of whole tensors are read one by one.
_ELEMENT_ALIGN = 4


@dataclass(frozen=True, slots=True)
class Launch:
    """How operands of some shapes, strides, dtypes and devices reach a kernel that takes them.

    What is left to look at in each call is where the tensors lie.
    """

    function: Callable[..., Any]
    #: For a, b and each epilogue tensor: its place in `Operands`, its shape for the kernel (None: as it is), and the
    #: multiple of bytes that it must start at.
    inputs: tuple[tuple[int, Shape | None, int], ...]
    out_shape: tuple[int, int]
    #: None where it is x's.
    out_dtype: torch.dtype | None
    #: The multiple of bytes that matrices must start at.
    align: int
    #: Whether x and w are matrices already, and a result of `out_shape` and x's dtype is what the caller gets.
    as_given: bool
    #: What a result of `out_shape` is to the caller, None for the same.
    result_shape: Shape | None

    def arguments(self, operands: Operands) -> list[Tensor] | str:
        """The kernel's arguments but out; or the name of a limit that is broken by where tensors lie, out too."""
        found: list[Tensor] = []
        for place, shape, align in self.inputs:
            tensor: Any = operands[place]
            if shape is not None:
                tensor = tensor.reshape(shape)
            flaw = address_flaw(tensor, align)
            if flaw is not None:
                return flaw
            found.append(tensor)
        out = operands.out
        if out is not None:
            if _is_read_elsewhere(out, operands):
                return "out"
            flaw = address_flaw(out, self.align)
            if flaw is not None:
                return flaw
        return found

    def new_out(self, x: Tensor) -> Tensor:
        """A tensor of `out_shape` on the device of `x`."""
        dtype = self.out_dtype
        return x.new_empty(self.out_shape) if dtype is None else x.new_empty(self.out_shape, dtype=dtype)


def _is_read_elsewhere(out: Tensor, operands: Operands) -> bool:
    """Whether an operand lies where out is written, while it may still be read. Of a residual that is out itself, the
    kernel reads each element before it writes that one."""
    residual = operands.residual
    read = (operands.x, operands.w, operands.bias, operands.scale_a, operands.scale_b)
    others = read if residual is out else (*read, residual)
    return overlap(out, others)


def layouts_of(form: Form, operands: Operands) -> tuple[str, str]:
    """The layouts of a and b by the strides of x and w: `km` and `kn` for views of a transposed matrix."""
    try:
        x = operands.x if form.batched else as_matrix(operands.x)
        return "km" if x is not None and transposed(x) else "mk", "kn" if transposed(operands.w) else "nk"
    except RuntimeError:
        # A tensor without strides.
        return "mk", "nk"


def prepare(choice: Choice, family: ProblemFamily, form: Form, operands: Operands) -> Launch | str:
    """The launch of the kernel of `choice`, or the name of the first limit that operands of the kind break. Reads
    shapes, strides, dtypes and devices, and nothing else of them."""
    if choice.function is None or form.batch != 1:
        # The entry ABI has matrices only.
        return "batch"
    wanted = form.out_dtype
    scales = (operands.scale_a, operands.scale_b)
    if any(t is not None and t.dtype != wanted for t in (operands.bias, operands.residual)) or any(
        t is not None and t.dtype != torch.float32 for t in scales
    ):
        return "dtype"
    out_divisor = max(1, choice.align_bytes // wanted.itemsize)
    if form.n % choice.divisibility or form.k % choice.divisibility or form.shape[-1] % out_divisor:
        return "divisibility"
    if max(form.m * form.n, form.m * form.k, form.n * form.k) >= MAX_ELEMENTS:
        return "size"
    try:
        flaw = _layout_flaw(choice, family, operands, out_divisor)
    except RuntimeError:
        # A tensor without strides.
        return "subclass"
    return flaw or _launch_of(choice.function, choice, form, operands)


def _layout_flaw(choice: Choice, family: ProblemFamily, operands: Operands, out_divisor: int) -> str | None:
    for vector in (operands.bias, operands.scale_a, operands.scale_b):
        flaw = None if vector is None else vector_flaw(vector)
        if flaw is not None:
            return flaw
    kinds = (
        (operands.x, family.a_layout == "km", choice.divisibility),
        (operands.w, family.b_layout == "kn", choice.divisibility),
        (operands.residual, False, out_divisor),
    )
    for tensor, by_columns, divisor in kinds:
        matrix = None if tensor is None else as_matrix(tensor)
        if matrix is not None:
            # Without a 2-D view a copy will be made, which is in order.
            flaw = matrix_flaw(matrix.T if by_columns else matrix, divisor)
            if flaw is not None:
                return flaw
    if operands.out is None:
        return None
    target = as_matrix(operands.out)
    # A copy would be written and lost.
    if target is None or overlaps_itself(target):
        return "out"
    return matrix_flaw(target, out_divisor)


def _launch_of(function: Callable[..., Any], choice: Choice, form: Form, operands: Operands) -> Launch:
    single = form.epilogue.scale == "tensor"
    out_shape = (form.m, form.shape[-1])
    shapes: dict[str, Shape] = {
        "x": (form.m, form.k),
        "w": (form.n, form.k),
        "bias": (form.n,),
        "residual": out_shape,
        "scale_a": (1,) if single else (form.m,),
        "scale_b": (1,) if single else (form.n,),
    }
    inputs: list[tuple[int, Shape | None, int]] = []
    for name in ("x", "w", *form.epilogue.operands()):
        shape, place = shapes[name], Operands._fields.index(name)
        given = operands[place]
        as_it_is = given is not None and given.shape == shape
        one_by_one = name == "scale_a" or (name == "scale_b" and single)
        inputs.append((place, None if as_it_is else shape, _ELEMENT_ALIGN if one_by_one else choice.align_bytes))
    out_dtype = None if form.out_dtype == form.x_dtype else form.out_dtype
    result_shape = None if form.shape == out_shape else form.shape
    return Launch(
        function=function,
        inputs=tuple(inputs),
        out_shape=out_shape,
        out_dtype=out_dtype,
        align=choice.align_bytes,
        as_given=out_dtype is None and result_shape is None,
        result_shape=result_shape,
    )


def smallest_arguments(family: ProblemFamily, choice: Choice, device: torch.device) -> list[Tensor]:
    """Zeros of one row and of small sizes that the kernel of `choice` takes; n and k are dynamic."""
    # Half of it, a gated out's columns, is still a multiple of the alignment.
    size = 4 * math.lcm(choice.divisibility, choice.align_bytes)
    columns = family.epilogue.out_columns(size)

    def zeros(rows: int, width: int, dtype: str, by_columns: bool) -> Tensor:
        kind = getattr(torch, dtype)
        if not by_columns:
            return torch.zeros((rows, width), dtype=kind, device=device)
        return torch.zeros((width, size), dtype=kind, device=device).T[:rows]

    def vector(length: int, dtype: str) -> Tensor:
        return torch.zeros(length, dtype=getattr(torch, dtype), device=device)

    makers: dict[str, Callable[[], Tensor]] = {
        "scale_a": lambda: vector(1, "float32"),
        "scale_b": lambda: vector(1 if family.epilogue.scale == "tensor" else size, "float32"),
        "bias": lambda: vector(size, family.out_dtype),
        "residual": lambda: zeros(1, columns, family.out_dtype, family.out_layout == "nm"),
    }
    return [
        zeros(1, size, family.a_dtype, family.a_layout == "km"),
        zeros(size, size, family.b_dtype, family.b_layout == "kn"),
        zeros(1, columns, family.out_dtype, family.out_layout == "nm"),
        *(makers[name]() for name in family.epilogue.operands()),
    ]
