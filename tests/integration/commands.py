"""The command line in processes of its own, and the out-of-tree kernel family `toy` installed in a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import ROOT

#: Asked without importing it: the compiler must not get into the process of the tests.
needs_compiler = pytest.mark.skipif(find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")

TOY = Path(__file__).with_name("toy_kernels.py")


def environment(cache: Path, records: Path, *folders: Path, **extra: str) -> dict[str, str]:
    """This environment, with caches and records of the test's own and `folders` on the module path."""
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("GEMMCACHE_", "TOY_"))},
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *folders))),
        "PYTHONWARNINGS": "ignore",
        "GEMMCACHE_CACHE_DIR": str(cache),
        "GEMMCACHE_RECORDS_DIR": str(records),
        **extra,
    }


def python(
    code: str, *arguments: object, env: Mapping[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fresh interpreter and waits for it."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


RUN = "import sys\nfrom gemmcache.cli.app import run\nsys.exit(run(sys.argv[1:]))\n"


def gemmcache(
    *arguments: object, env: Mapping[str, str], before: str = "", cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a fresh interpreter, after the statements `before`."""
    return python(before + RUN, *arguments, env=env, cwd=cwd)


def install_toy(folder: Path, entry_points: str = "toy = toy_kernels:ToyFamily") -> Path:
    """Makes `folder` look like one that pip installed the toy family into."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(TOY, folder)
    info = folder / "toy_kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-kernels\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[gemmcache.kernel_families]\n{entry_points}\n")
    return folder
