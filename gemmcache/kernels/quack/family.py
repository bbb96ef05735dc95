"""The kernel family `quack`."""

from __future__ import annotations

from gemmcache.environment import package_version
from gemmcache.errors import MissingPackageError
from gemmcache.kernels.dense import DenseFamily
from gemmcache.kernels.interface import Config, KernelSpec
from gemmcache.kernels.quack import rules
from gemmcache.kernels.quack.space import FAMILY, space
from gemmcache.problem import ProblemFamily

PACKAGE = "quack-kernels"
#: The glue relies on internals, so it is tested against one version and refuses others.
VERSION = "0.6.5"


def installed() -> bool:
    """Whether the pinned version of the package is installed; nothing is imported."""
    return package_version(PACKAGE) == VERSION


class QuackFamily(DenseFamily):
    """quack-kernels: 16-bit floats and float8, with scales, bias, activation, gate and residual fused."""

    name = FAMILY
    package = PACKAGE
    sources = "quack/"
    extra = "quack"
    entry_module = "gemmcache.kernels.quack.entry"
    entry_parts = ("gemmcache.kernels.quack.epilogue",)

    def excluded(self, family: ProblemFamily, arch: str) -> str | None:
        return rules.excluded(family, arch)

    def space(self, family: ProblemFamily, arch: str) -> tuple[Config, ...]:
        return space(family, arch)

    def divisibility(self, family: ProblemFamily) -> int:
        return rules.divisibility_of(family)

    def cta_tile(self, config: Config) -> tuple[int, int]:
        rows, columns = super().cta_tile(config)
        # On sm_100a a pair of CTAs shares a tile of 256 rows.
        return (128 if config["kernel"] == "sm100" else rows), columns

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
