"""From a jitted entry to a relocatable object, without a GPU and without a driver."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from gemmcache import dtypes
from gemmcache.environment import CUDA_MAJOR
from gemmcache.epilogue import Epilogue
from gemmcache.errors import CompileError, MissingPackageError, UnsupportedError
from gemmcache.kernels.interface import KernelSpec


def element_type(dtype: str) -> Any:
    """The CuTe DSL element type of a dtype name."""
    import cutlass

    names = {
        "bfloat16": "BFloat16",
        "float16": "Float16",
        "float32": "Float32",
        "float8_e4m3fn": "Float8E4M3FN",
        "float8_e5m2": "Float8E5M2",
        "int8": "Int8",
        "int32": "Int32",
    }
    if dtype not in names:
        raise UnsupportedError(f"the CuTe DSL has no dtype '{dtype}'")
    return getattr(cutlass, names[dtype])


def compile_entry(entry: Any, spec: KernelSpec, function_name: str) -> bytes:
    """The object that exports `function_name` as a tvm-ffi function `(a[M, K], b[N, K], out[M, N'], *epilogue)`.

    Layouts are a matter of strides: a is [M, K] with its columns contiguous for `mk` and its rows for `km`, and so on.
    M, N, K and the other strides are dynamic; n, k and the strides of a and b are declared multiples of
    `spec.divisibility`, pointers and the rows of out aligned to `spec.align_bytes`, so the exported argument checks
    reject what breaks these limits. Epilogue operands: scales are float32 vectors (of one element per tensor, M per
    row, N per column), bias is a vector [N] and residual a matrix [M, N'] of the out dtype.
    Raises `CompileError` with the compiler's words, `MissingPackageError` without the compiler.
    """
    try:
        import cutlass
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
    except ImportError as error:
        raise MissingPackageError(f"can't import {error.name}", remedy="pip install 'gemmcache[build]'") from error

    found = cutlass.CUDA_VERSION.major
    if found != CUDA_MAJOR:
        raise MissingPackageError(
            f"the CuTe DSL loaded its CUDA {found} flavour, not CUDA {CUDA_MAJOR}",
            remedy=f"pip install 'nvidia-cutlass-dsl[cu{CUDA_MAJOR}]'",
        )

    epilogue = Epilogue.parse(spec.epilogue)
    out_divisibility = spec.align_bytes // dtypes.SIZES[spec.out_dtype]

    def matrix(dtype: str, rows: Any, columns: Any, divisibility: int, by_rows: bool = True) -> Any:
        apart = cute.sym_int64(divisibility=divisibility)
        stride = (apart, 1) if by_rows else (1, apart)
        return make_fake_tensor(element_type(dtype), (rows, columns), stride=stride, assumed_align=spec.align_bytes)

    def vector(dtype: str, size: Any, align: int) -> Any:
        return make_fake_tensor(element_type(dtype), (size,), stride=(1,), assumed_align=align)

    m = cute.sym_int()
    n, k = (cute.sym_int(divisibility=spec.divisibility) for _ in range(2))
    # Half as many under a gate; that it is half is the caller's to keep.
    columns = cute.sym_int(divisibility=out_divisibility) if epilogue.gate else n
    operands = [
        matrix(spec.a_dtype, m, k, spec.divisibility, spec.a_layout == "mk"),
        matrix(spec.b_dtype, n, k, spec.divisibility, spec.b_layout == "nk"),
        matrix(spec.out_dtype, m, columns, out_divisibility),
    ]
    per_tensor = epilogue.scale == "tensor"
    for name in epilogue.operands():
        if name == "residual":
            operands.append(matrix(spec.out_dtype, m, columns, out_divisibility))
        elif name == "bias":
            operands.append(vector(spec.out_dtype, n, spec.align_bytes))
        elif per_tensor:
            operands.append(vector("float32", 1, 4))
        else:
            operands.append(vector("float32", m, 4) if name == "scale_a" else vector("float32", n, spec.align_bytes))
    # The arch is always given: without one and without a GPU the DSL would compile for sm_100a.
    compiler = cute.compile[cute.GPUArch(spec.arch), cute.EnableTVMFFI(True)]
    try:
        compiled = compiler(entry, *operands, make_fake_stream(use_tvm_ffi_env_stream=True))
        with tempfile.TemporaryDirectory(prefix="gemmcache-") as folder:
            path = Path(folder) / "kernel.o"
            compiled.export_to_c(str(path), function_name=function_name, export_only_tvm_ffi_symbols=True)
            return path.read_bytes()
    except Exception as error:
        raise CompileError(f"{spec.config} for {spec.arch}: {type(error).__name__}: {error}") from error
