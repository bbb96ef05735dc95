"""The kernel family `quack`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from gemmcache.environment import package_digest, package_version
from gemmcache.errors import MissingPackageError, UnsupportedError
from gemmcache.kernels import cost
from gemmcache.kernels.interface import Config, KernelFamily, KernelSpec
from gemmcache.kernels.quack.space import FAMILY, SPACES
from gemmcache.problem import Problem, ProblemFamily
from gemmcache.target import Target

PACKAGE = "quack-kernels"
#: The glue relies on internals, so it is tested against one version and refuses others.
VERSION = "0.6.5"
EPILOGUES = ("none", "bias", "residual", "bias+residual")


def installed() -> bool:
    """Whether the pinned version of the package is installed; nothing is imported."""
    return package_version(PACKAGE) == VERSION


class QuackFamily(KernelFamily):
    """Dense 16-bit GEMMs with a linear epilogue: out = a @ b.T + bias + residual, k-major a and b, row-major out."""

    name = FAMILY

    def source_digest(self) -> str:
        return _source_digest()

    def unsupported(self, family: ProblemFamily, target: Target) -> str | None:
        reasons = (
            (target.arch not in SPACES, f"no kernels for {target.arch}"),
            (family.a_dtype != family.b_dtype, "a and b differ in dtype"),
            (family.a_dtype not in ("bfloat16", "float16"), f"dtype {family.a_dtype}"),
            (family.out_dtype != family.a_dtype, f"out dtype {family.out_dtype} differs from {family.a_dtype}"),
            (family.acc_dtype != "float32", f"accumulator {family.acc_dtype}"),
            (family.batch != 1, "batched problems"),
            ((family.a_layout, family.b_layout, family.out_layout) != ("mk", "nk", "mn"), "other layouts"),
            (str(family.epilogue) not in EPILOGUES, f"epilogue {family.epilogue}"),
            (family.n % 8 != 0 or family.k % 8 != 0, "n and k that are no multiples of 8"),
        )
        return next((text for applies, text in reasons if applies), None)

    def configs(self, family: ProblemFamily, target: Target) -> Iterator[Config]:
        if self.unsupported(family, target) is None:
            yield from SPACES[target.arch]()

    def spec(self, config: Config, family: ProblemFamily, target: Target) -> KernelSpec:
        reason = self.unsupported(family, target)
        if reason is not None:
            raise UnsupportedError(f"kernel family '{self.name}' does not support {reason}")
        if config not in _space(target.arch):
            raise UnsupportedError(f"{config} is not in the space of '{self.name}' for {target.arch}")
        # The persistent grid is a run-time argument of the class, but a constant of the entry.
        return KernelSpec.for_family(config, family, target.arch, target.sm_count)

    def estimate_us(self, config: Config, problem: Problem, target: Target) -> float:
        tile, cluster = config["tile"], config["cluster"]
        if not isinstance(tile, tuple) or not isinstance(cluster, tuple):
            raise UnsupportedError(f"{config} has no tile")
        return cost.estimate_us(
            problem, target, tile=(tile[0], tile[1]), cluster=(cluster[0], cluster[1]), swap=bool(config["swap_ab"])
        )

    def compile(self, spec: KernelSpec, function_name: str) -> bytes:
        found = package_version(PACKAGE)
        if found != VERSION:
            raise MissingPackageError(
                f"{PACKAGE} {VERSION} is needed, {found or 'none'} is installed",
                remedy="pip install 'gemmcache[quack]'",
            )
        from gemmcache.kernels.compiler import compile_entry

        try:
            from gemmcache.kernels.quack.entry import make_entry
        except ImportError as error:
            raise MissingPackageError(f"can't import {error.name}", remedy="pip install 'gemmcache[quack]'") from error
        return compile_entry(make_entry(spec), spec, function_name)


@lru_cache(maxsize=8)
def _space(arch: str) -> frozenset[Config]:
    return frozenset(SPACES[arch]())


@lru_cache(maxsize=1)
def _source_digest() -> str:
    kernels = package_digest(PACKAGE, "quack/")
    if kernels is None:
        raise MissingPackageError(f"{PACKAGE} is not installed", remedy="pip install 'gemmcache[quack]'")
    total = hashlib.sha256(kernels.encode())
    for path in (Path(__file__).parent / "entry.py", Path(__file__).parents[1] / "compiler.py"):
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()
