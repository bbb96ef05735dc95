"""The kernel family `quack`."""

from __future__ import annotations

from gemmcache.environment import package_version
from gemmcache.errors import MissingPackageError
from gemmcache.kernels.dense import DenseFamily
from gemmcache.kernels.interface import Config, KernelSpec
from gemmcache.kernels.quack.space import FAMILY, SPACES

PACKAGE = "quack-kernels"
#: The glue relies on internals, so it is tested against one version and refuses others.
VERSION = "0.6.5"
EPILOGUES = ("none", "bias", "residual", "bias+residual")


def installed() -> bool:
    """Whether the pinned version of the package is installed; nothing is imported."""
    return package_version(PACKAGE) == VERSION


class QuackFamily(DenseFamily):
    """quack-kernels: out = a @ b.T + bias + residual."""

    name = FAMILY
    package = PACKAGE
    sources = "quack/"
    extra = "quack"
    spaces = SPACES
    epilogues = EPILOGUES
    entry_module = "gemmcache.kernels.quack.entry"

    def bakes_sm_count(self, config: Config) -> bool:
        # The persistent grid is a run-time argument of the class, but a constant of the entry.
        return True

    def compile(self, spec: KernelSpec, function_name: str) -> bytes:
        found = package_version(PACKAGE)
        if found != VERSION:
            raise MissingPackageError(
                f"{PACKAGE} {VERSION} is needed, {found or 'none'} is installed",
                remedy="pip install 'gemmcache[quack]'",
            )
        return super().compile(spec, function_name)
