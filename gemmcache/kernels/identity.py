"""The digest that names a compiled kernel: its spec and everything else that determines its bytes."""

from __future__ import annotations

from collections.abc import Iterable

from gemmcache import codec
from gemmcache.environment import CUDA_MAJOR, Toolchain, package_version
from gemmcache.kernels.interface import KernelFamily, KernelSpec
from gemmcache.target import Host


def detect_toolchain(families: Iterable[KernelFamily]) -> Toolchain:
    """The installed compiler, tvm-ffi and kernel sources; nothing is imported."""
    return Toolchain(
        dsl=package_version("nvidia-cutlass-dsl"),
        cuda_major=CUDA_MAJOR if package_version(f"nvidia-cutlass-dsl-libs-cu{CUDA_MAJOR}") else None,
        tvm_ffi=package_version("apache-tvm-ffi"),
        kernel_sources=tuple(sorted((f.name, f.source_digest()) for f in families)),
    )


def kernel_digest(spec: KernelSpec, toolchain: Toolchain, host: Host) -> str:
    """sha256 over spec, compiler version, the kernel family's sources, and the host: the launch code inside an object
    is compiled for the building machine's CPU level."""
    sources = dict(toolchain.kernel_sources).get(spec.config.kernel_family)
    made_with = [toolchain.dsl, toolchain.cuda_major, toolchain.tvm_ffi, sources]
    return codec.digest("kernel", [spec.to_value(), *made_with, host.to_value()])
