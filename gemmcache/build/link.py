"""Linking objects into one shared object, with whichever linker the machine has."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from gemmcache.bundle.fs import storage_errors
from gemmcache.errors import ToolError

_LINK_SECONDS = 300
# No build id, no symbol table beyond the dynamic one, no paths: equal objects and one linker give equal bytes.
_LD_FLAGS = ("--build-id=none", "--strip-all", "-z", "noexecstack", "--hash-style=gnu")


def linker() -> list[str]:
    """The command that links a shared object: ld, lld, or a compiler driver, in this order. Raises `ToolError`."""
    for name in ("ld", "ld.lld"):
        found = shutil.which(name)
        if found:
            return [found, "-shared", *_LD_FLAGS]
    drivers = [[p] for p in map(shutil.which, ("gcc", "cc", "clang")) if p]
    if find_spec("ziglang"):
        drivers.append([sys.executable, "-m", "ziglang", "cc"])
    if drivers:
        return [*drivers[0], "-shared", "-nostdlib", "-Wl," + ",".join(_LD_FLAGS)]
    raise ToolError("no linker found", remedy="install binutils (ld), or pip install ziglang")


def link(objects: Mapping[str, bytes]) -> bytes:
    """One shared object of all `objects` (by kernel digest), in digest order. Raises `ToolError`, and `StorageError`
    if the temporary folder can't hold it."""
    command = linker()
    with (
        storage_errors("can't link in the temporary folder"),
        tempfile.TemporaryDirectory(prefix="gemmcache-link-") as name,
    ):
        folder = Path(name)
        for digest in sorted(objects):
            (folder / f"{digest}.o").write_bytes(objects[digest])
        # Relative names and a response file: no path of this machine gets near the output, and no argument limit.
        (folder / "objects.txt").write_text("\n".join(f"{d}.o" for d in sorted(objects)))
        try:
            subprocess.run(
                [*command, "-o", "kernels.so", "@objects.txt"],
                cwd=folder,
                check=True,
                capture_output=True,
                text=True,
                timeout=_LINK_SECONDS,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.CalledProcessError as error:
            raise ToolError(f"{command[0]} failed: {error.stderr.strip()[-2000:]}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ToolError(f"{command[0]} failed: {error}") from error
        return (folder / "kernels.so").read_bytes()
