"""What kernels are compiled for: a GPU target by name or as found, and the host beside it."""

from __future__ import annotations

import platform
import re
from dataclasses import asdict, dataclass

from gemmcache import codec
from gemmcache.errors import DeviceError, UsageError

_ARCH = re.compile(r"sm_[1-9][0-9]{1,2}[af]?")


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU as the compiler and the tuner see it. Sizes in bytes; `arch` with its suffix, as in `sm_90a`.

    Raises `UsageError` for another form of `arch`.
    """

    arch: str
    sm_count: int
    l2_bytes: int
    smem_bytes: int
    product: str

    def __post_init__(self) -> None:
        if not _ARCH.fullmatch(self.arch):
            raise UsageError(f"arch '{self.arch}' is not known", remedy="for example sm_90a")

    def to_value(self) -> dict[str, codec.Value]:
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: codec.Fields) -> Target:
        arch = fields.text("arch")
        if not _ARCH.fullmatch(arch):
            raise fields.fail("arch", f"is '{arch}', not of the form sm_90a")
        target = cls(
            arch=arch,
            sm_count=fields.integer("sm_count", low=1, high=4096),
            l2_bytes=fields.integer("l2_bytes"),
            smem_bytes=fields.integer("smem_bytes"),
            product=fields.text("product"),
        )
        fields.done()
        return target

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, (9, 0) for sm_90a."""
        number = int(self.arch.removeprefix("sm_").rstrip("af"))
        return number // 10, number % 10

    @property
    def key(self) -> dict[str, codec.Value]:
        """What tells one product's winners from another's of the same chip.

        L2 and shared memory follow from it.
        """
        return {"arch": self.arch, "sm_count": self.sm_count, "product": self.product}

    def is_sibling(self, other: Target) -> bool:
        """Whether both have the same arch and SM count, and differ in memory and clocks at most."""
        return (self.arch, self.sm_count) == (other.arch, other.sm_count)

    def __str__(self) -> str:
        return f"{self.product} ({self.arch}, {self.sm_count} SMs)"


_MIB = 1 << 20

#: Products by the short names that `--target` takes. Figures as the CUDA driver reports them.
TARGETS: dict[str, Target] = {
    "a100": Target("sm_80", 108, 40 * _MIB, 166912, "NVIDIA A100"),
    "h100": Target("sm_90a", 132, 50 * _MIB, 232448, "NVIDIA H100"),
    "h200": Target("sm_90a", 132, 60 * _MIB, 232448, "NVIDIA H200"),
    "h20": Target("sm_90a", 78, 60 * _MIB, 232448, "NVIDIA H20"),
    "b200": Target("sm_100a", 148, 126 * _MIB, 232448, "NVIDIA B200"),
    "rtx5090": Target("sm_120a", 170, 96 * _MIB, 101376, "NVIDIA GeForce RTX 5090"),
}

#: How the driver begins the names of the boards of one product. A GeForce card's name is its product: what follows
#: it (` Ti`, ` D`, ` Laptop GPU`) is another chip.
_PRODUCTS = ("NVIDIA A100", "NVIDIA H100", "NVIDIA H200", "NVIDIA H20", "NVIDIA B200")


def product_of(device_name: str) -> str:
    """The product of a device name, `NVIDIA H100` for `NVIDIA H100 80GB HBM3` and for `NVIDIA H100 PCIe`.

    Those two differ in SM count, which the key holds beside the product. A MIG slice keeps its own name.
    """
    if " MIG " in device_name:
        return device_name
    for product in _PRODUCTS:
        if device_name == product or device_name.startswith((product + " ", product + "-")):
            return product
    return device_name


def arch_of(capability: tuple[int, int]) -> str:
    """The arch to compile for on a device of a compute capability.

    From sm_90 on it has the suffix of the architecture-specific instructions.
    """
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def named_target(name: str) -> Target:
    """The target of a short name such as `h200`. Raises `UsageError` for another name."""
    target = TARGETS.get(name.lower())
    if target is None:
        raise UsageError(f"target '{name}' is not known", remedy=f"one of {', '.join(TARGETS)}, or 'native'")
    return target


def detect_target(device: int = 0) -> Target:
    """GPU number `device` of this machine, through torch. Raises `DeviceError` where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise DeviceError("no CUDA device is visible", remedy="name a target, for example --target h200")
    count = torch.cuda.device_count()
    if not 0 <= device < count:
        raise DeviceError(f"CUDA device {device} is not there", remedy=f"0 to {count - 1} are visible")
    p = torch.cuda.get_device_properties(device)
    return Target(
        arch=arch_of((p.major, p.minor)),
        sm_count=p.multi_processor_count,
        l2_bytes=p.L2_cache_size,
        smem_bytes=p.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        product=product_of(p.name),
    )


#: x86-64 levels with the flags of /proc/cpuinfo that each adds (System V psABI, "x86-64-v2" and up).
_X86_LEVELS: tuple[tuple[str, frozenset[str]], ...] = (
    ("x86-64-v2", frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"})),
    ("x86-64-v3", frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})),
    ("x86-64-v4", frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})),
)


@dataclass(frozen=True, slots=True)
class Host:
    """The CPU side of a kernel's object: machine, instruction set level, C library."""

    arch: str
    isa: str
    libc: str = "gnu"

    def to_value(self) -> dict[str, codec.Value]:
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: codec.Fields) -> Host:
        host = cls(fields.text("arch"), fields.text("isa"), fields.text("libc"))
        fields.done()
        return host

    def runs_on(self, other: Host) -> bool:
        """Whether code for this host runs on `other`: same machine and libc, and a level at least as high."""
        if self.arch != other.arch or self.libc != other.libc:
            return False
        levels = ["x86-64", *(name for name, _ in _X86_LEVELS)]
        if self.isa in levels and other.isa in levels:
            return levels.index(self.isa) <= levels.index(other.isa)
        return self.isa == other.isa


def detect_host(cpuinfo: str | None = None) -> Host:
    """The host that this process runs on. `cpuinfo` is the text of /proc/cpuinfo, read if not given."""
    machine = platform.machine()
    libc = "gnu" if platform.libc_ver()[0] == "glibc" else "unknown"
    if machine != "x86_64":
        return Host(machine, machine, libc)
    if cpuinfo is None:
        try:
            with open("/proc/cpuinfo") as file:
                # The first processor is enough, and the file is made anew, for hundreds of them, at each reading.
                cpuinfo = file.read(1 << 14)
        except OSError:
            cpuinfo = ""
    flags = next((set(line.split()) for line in cpuinfo.splitlines() if line.startswith("flags")), set())
    isa = "x86-64"
    for level, needed in _X86_LEVELS:
        if not needed <= flags:
            break
        isa = level
    return Host(machine, isa, libc)
