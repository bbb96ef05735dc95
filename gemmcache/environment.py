"""What a measurement or a bundle was made with: target, driver and versions, each None where unknown."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from gemmcache import codec
from gemmcache.errors import StorageError
from gemmcache.target import Target, detect_target

#: The CUDA major whose flavour of the DSL compiles kernels here; the base install brings its runtime library.
CUDA_MAJOR = 13


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The versions that determine the bytes of a compiled kernel."""

    dsl: str | None = None
    #: CUDA major of the DSL's flavour: it brings ptxas, and names the runtime library that serves the kernels.
    cuda_major: int | None = None
    tvm_ffi: str | None = None
    #: kernel family name -> digest of its sources, sorted by name
    kernel_sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernel_sources", tuple(sorted(self.kernel_sources)))

    def to_value(self) -> dict[str, codec.Value]:
        return {
            "dsl": self.dsl,
            "cuda_major": self.cuda_major,
            "tvm_ffi": self.tvm_ffi,
            "kernel_sources": dict(self.kernel_sources),
        }

    @classmethod
    def from_fields(cls, fields: codec.Fields) -> Toolchain:
        sources = fields.sub("kernel_sources")
        names = sources.extra()
        toolchain = cls(
            dsl=fields.opt_text("dsl"),
            cuda_major=None if fields.raw("cuda_major") is None else fields.integer("cuda_major", low=1, high=99),
            tvm_ffi=fields.opt_text("tvm_ffi"),
            kernel_sources=tuple((name, sources.text(name)) for name in sorted(names)),
        )
        fields.done()
        return toolchain


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a measurement was taken. Versions as their own tools write them; None is unknown."""

    target: Target
    toolchain: Toolchain
    driver: str | None = None
    cuda_runtime: str | None = None
    torch: str | None = None
    cublas: str | None = None

    def to_value(self) -> dict[str, codec.Value]:
        return {
            "target": self.target.to_value(),
            "toolchain": self.toolchain.to_value(),
            "driver": self.driver,
            "cuda_runtime": self.cuda_runtime,
            "torch": self.torch,
            "cublas": self.cublas,
        }

    @classmethod
    def from_fields(cls, fields: codec.Fields) -> Environment:
        environment = cls(
            target=Target.from_fields(fields.sub("target")),
            toolchain=Toolchain.from_fields(fields.sub("toolchain")),
            driver=fields.opt_text("driver"),
            cuda_runtime=fields.opt_text("cuda_runtime"),
            torch=fields.opt_text("torch"),
            cublas=fields.opt_text("cublas"),
        )
        fields.done()
        return environment

    @classmethod
    def from_value(cls, value: object, where: str = "environment") -> Environment:
        return cls.from_fields(codec.Fields(value, where))

    @property
    def digest(self) -> str:
        """sha256 that names this environment; any field changes it."""
        return codec.digest("environment", self.to_value())


def package_version(name: str) -> str | None:
    """The installed version of a pip package, None if it is not installed. Nothing is imported."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@lru_cache(maxsize=64)
def package_digest(name: str, folder: str) -> str | None:
    """sha256 over the Python sources that pip package `name` installed under `folder`.

    None if the package is absent or lists no such source. Names and contents go in, so a patched
    installation differs from the release. Nothing is imported. Raises `StorageError` for a source that is
    listed and can't be read.
    """
    try:
        files = metadata.files(name) or []
    except metadata.PackageNotFoundError:
        return None
    sources = sorted((f for f in files if f.suffix == ".py" and folder in str(f)), key=str)
    total = hashlib.sha256()
    for file in sources:
        try:
            data = Path(str(file.locate())).read_bytes()
        except OSError as error:
            raise StorageError(
                f"source {file} of package '{name}' can't be read: {error}", remedy=f"reinstall {name}"
            ) from error
        total.update(f"{str(file).partition(folder)[2]}\0{len(data)}\0".encode())
        total.update(data)
    return total.hexdigest() if sources else None


def driver_version() -> str | None:
    """The NVIDIA driver's version, from the kernel module or NVML, without a CUDA context; None where there is none."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip() or None
    except OSError:
        pass
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return version.decode() if isinstance(version, bytes) else str(version)


def detect_environment(toolchain: Toolchain, device: int = 0) -> Environment:
    """The environment of this process and `device`. Raises `DeviceError` without a CUDA device."""
    import torch

    target = detect_target(device)
    return Environment(
        target=target,
        toolchain=toolchain,
        driver=driver_version(),
        cuda_runtime=torch.version.cuda,
        # A plain str: torch's own class compares by version, not by text.
        torch=str(torch.__version__),
        cublas=package_version("nvidia-cublas") or package_version("nvidia-cublas-cu12"),
    )
