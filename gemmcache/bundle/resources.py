"""Registers, stack and shared memory of compiled kernels, as NVIDIA's cuobjdump reports them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from gemmcache.bundle import elf
from gemmcache.errors import ToolError

PACKAGE = "nvidia-cuda-cuobjdump"
_TIMEOUT_S = 60.0
_FUNCTION = re.compile(
    r"Function (?P<name>\S+):\s+"
    r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:(?P<shared>\d+) LOCAL:(?P<local>\d+)"
)


@dataclass(frozen=True, slots=True)
class Usage:
    """One GPU function: registers a thread; bytes of stack and of local memory a thread (spilled registers
    are in the stack); bytes of static shared memory a block. What a launch asks for is not in it."""

    gpu_function: str
    registers: int
    stack: int
    shared: int
    local: int

    def to_value(self) -> dict[str, object]:
        return asdict(self)


def find_cuobjdump() -> Path | None:
    """The tool of the pip package if that is installed, else that on PATH, else None."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "cuobjdump":
            path = Path(str(file.locate()))
            if os.access(path, os.X_OK):
                return path
    found = shutil.which("cuobjdump")
    return Path(found) if found else None


def kernel_usage(data: bytes, tool: Path, symbols: Sequence[str]) -> dict[str, tuple[Usage, ...]]:
    """What the GPU functions behind each of `symbols` use, for the shared object `data`.

    The tool does not see images inside host code, so they are cut out for it. Kernels and images stand in one
    order, that of linking, which is how they are matched; where their numbers differ the result is empty.
    Raises `IntegrityError` for a broken object, `ToolError` if the tool fails.
    """
    exported = elf.exports(data)
    entries = sorted((address, name) for name, address in exported.items() if name in set(symbols))
    images = elf.gpu_images(data)
    if len(entries) != len(images):
        return {}
    return {name: image_usage(image, tool) for (_, name), image in zip(entries, images, strict=True)}


def image_usage(image: bytes, tool: Path) -> tuple[Usage, ...]:
    """What each function of one GPU image uses. Raises `ToolError` if the tool fails."""
    with tempfile.NamedTemporaryFile(prefix="gemmcache-", suffix=".cubin") as file:
        file.write(image)
        file.flush()
        try:
            done = subprocess.run(
                [str(tool), "--dump-resource-usage", file.name],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ToolError(f"{tool} can't be run: {error}") from error
    if done.returncode:
        raise ToolError(f"{tool} ended with {done.returncode}: {done.stderr.strip()[:400]}")
    return tuple(
        Usage(
            m["name"],
            registers=int(m["registers"]),
            stack=int(m["stack"]),
            shared=int(m["shared"]),
            local=int(m["local"]),
        )
        for m in _FUNCTION.finditer(done.stdout)
    )
