"""From a jitted entry to a relocatable object, without a GPU and without a driver."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

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
    """The object that exports `function_name` as a tvm-ffi function `(a[M, K], b[N, K], out[M, N], *epilogue)`.

    M, N, K and the row strides are dynamic; n, k and strides are declared multiples of `spec.divisibility` and
    pointers aligned to `spec.align_bytes`, so the exported argument checks reject what breaks these limits.
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

    def operand(dtype: str, rows: Any, columns: Any) -> Any:
        stride = cute.sym_int64(divisibility=spec.divisibility)
        return make_fake_tensor(
            element_type(dtype), (rows, columns), stride=(stride, 1), assumed_align=spec.align_bytes
        )

    m = cute.sym_int()
    n, k = (cute.sym_int(divisibility=spec.divisibility) for _ in range(2))
    operands = [operand(spec.a_dtype, m, k), operand(spec.b_dtype, n, k), operand(spec.out_dtype, m, n)]
    for name in Epilogue.parse(spec.epilogue).operands():
        if name == "residual":
            operands.append(operand(spec.out_dtype, m, n))
        elif name == "bias":
            dtype = element_type(spec.out_dtype)
            operands.append(make_fake_tensor(dtype, (n,), stride=(1,), assumed_align=spec.align_bytes))
        else:
            raise UnsupportedError(f"{spec.config}: epilogue operand '{name}' has no entry ABI yet")
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
