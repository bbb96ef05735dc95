"""What families of dense kernels from a pip package have in common."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from pathlib import Path

from gemmcache.environment import package_digest
from gemmcache.errors import MissingPackageError, UnsupportedError
from gemmcache.kernels import cost
from gemmcache.kernels.interface import Config, KernelFamily, KernelSpec
from gemmcache.problem import Problem, ProblemFamily
from gemmcache.target import Target


class DenseFamily(KernelFamily):
    """Kernels of one pip package whose every config has a `tile` (M x N, perhaps x K) and `swap_ab`, and may have a
    `cluster`.

    A subclass names the package, the folder of its sources, the extra that installs it, and the module whose
    `make_entry(spec)` gives the jitted entry; it says what it excludes, and which configs are left.
    """

    package: str
    sources: str
    extra: str
    entry_module: str
    #: Other modules whose sources make part of the kernels.
    entry_parts: tuple[str, ...] = ()

    @abstractmethod
    def excluded(self, family: ProblemFamily, arch: str) -> str | None:
        """Why no kernel computes `family` on `arch`; None if some do."""

    @abstractmethod
    def space(self, family: ProblemFamily, arch: str) -> tuple[Config, ...]:
        """Every valid config for `family` on `arch`, simplest first; none if `family` is excluded."""

    @abstractmethod
    def divisibility(self, family: ProblemFamily) -> int:
        """What n and k must be multiples of, in elements."""

    @abstractmethod
    def bakes_sm_count(self, config: Config) -> bool:
        """Whether the kernel of `config` takes its grid from the SM count at compile time."""

    def cta_tile(self, config: Config) -> tuple[int, int]:
        """Rows and columns of out that one CTA computes, for the cost model."""
        tile = config["tile"]
        if not isinstance(tile, tuple):
            raise UnsupportedError(f"{config} has no tile")
        return tile[0], tile[1]

    def source_digest(self) -> str:
        return _source_digest(self.package, self.sources, self.extra, (self.entry_module, *self.entry_parts))

    def unsupported(self, family: ProblemFamily, target: Target) -> str | None:
        return self.excluded(family, target.arch)

    def configs(self, family: ProblemFamily, target: Target) -> Iterator[Config]:
        yield from self.space(family, target.arch)

    def spec(self, config: Config, family: ProblemFamily, target: Target) -> KernelSpec:
        reason = self.excluded(family, target.arch)
        if reason is not None:
            raise UnsupportedError(f"kernel family '{self.name}' does not support {reason}")
        if config not in self.space(family, target.arch):
            raise UnsupportedError(f"{config} is not in the space of '{self.name}' for {family} on {target.arch}")
        sm_count = target.sm_count if self.bakes_sm_count(config) else None
        return KernelSpec.for_family(config, family, target.arch, sm_count, self.divisibility(family))

    def estimate_us(self, config: Config, problem: Problem, target: Target) -> float:
        params = config.as_dict()
        cluster = params.get("cluster", (1, 1))
        if not isinstance(cluster, tuple):
            raise UnsupportedError(f"{config}: cluster is not a pair")
        return cost.estimate_us(
            problem,
            target,
            tile=self.cta_tile(config),
            cluster=(cluster[0], cluster[1]),
            swap=bool(params["swap_ab"]),
        )

    def compile(self, spec: KernelSpec, function_name: str) -> bytes:
        from gemmcache.kernels.compiler import compile_entry

        try:
            entry = import_module(self.entry_module)
        except ImportError as error:
            raise MissingPackageError(f"can't import {error.name}", remedy=_remedy(self.extra)) from error
        return compile_entry(entry.make_entry(spec), spec, function_name)


def _remedy(extra: str) -> str:
    return f"pip install 'gemmcache[{extra}]'"


@lru_cache(maxsize=16)
def _source_digest(package: str, sources: str, extra: str, modules: tuple[str, ...]) -> str:
    """sha256 over the package's sources and those that turn them into an object here."""
    kernels = package_digest(package, sources)
    if kernels is None:
        raise MissingPackageError(f"{package} is not installed", remedy=_remedy(extra))
    total = hashlib.sha256(kernels.encode())
    here = Path(__file__).parent
    for path in (*(here.joinpath(*m.split(".")[2:]).with_suffix(".py") for m in modules), here / "compiler.py"):
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()
