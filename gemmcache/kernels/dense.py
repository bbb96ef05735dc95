"""What families of dense 16-bit kernels from a pip package have in common."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path

from gemmcache.environment import package_digest
from gemmcache.errors import MissingPackageError, UnsupportedError
from gemmcache.kernels import cost
from gemmcache.kernels.interface import Config, KernelFamily, KernelSpec
from gemmcache.problem import Problem, ProblemFamily
from gemmcache.target import Target

Space = Callable[[], Iterator[Config]]


class DenseFamily(KernelFamily):
    """Kernels for k-major a and b and row-major out of one 16-bit dtype, with fp32 accumulation.

    A subclass names its pip package, the folder of the package's sources, the extra that installs it, its spaces by
    arch, its epilogues, and the module whose `make_entry(spec)` gives the jitted entry. Every config has a `tile`
    (M x N, perhaps x K) and `swap_ab`, and may have a `cluster`.
    """

    package: str
    sources: str
    extra: str
    spaces: Mapping[str, Space]
    epilogues: tuple[str, ...]
    entry_module: str

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
        return _source_digest(self.package, self.sources, self.extra, self.entry_module)

    def unsupported(self, family: ProblemFamily, target: Target) -> str | None:
        layouts = (family.a_layout, family.b_layout, family.out_layout)
        reasons = (
            (target.arch not in self.spaces, f"no kernels for {target.arch}"),
            (family.a_dtype != family.b_dtype, "a and b differ in dtype"),
            (family.a_dtype not in ("bfloat16", "float16"), f"dtype {family.a_dtype}"),
            (family.out_dtype != family.a_dtype, f"out dtype {family.out_dtype} differs from {family.a_dtype}"),
            (family.acc_dtype != "float32", f"accumulator {family.acc_dtype}"),
            (family.batch != 1, "batched problems"),
            (layouts != ("mk", "nk", "mn"), "layouts other than mk,nk,mn"),
            (str(family.epilogue) not in self.epilogues, f"epilogue {family.epilogue}"),
            (family.n % 8 != 0 or family.k % 8 != 0, "n and k that are no multiples of 8"),
        )
        return next((text for applies, text in reasons if applies), None)

    def configs(self, family: ProblemFamily, target: Target) -> Iterator[Config]:
        if self.unsupported(family, target) is None:
            yield from self.spaces[target.arch]()

    def spec(self, config: Config, family: ProblemFamily, target: Target) -> KernelSpec:
        reason = self.unsupported(family, target)
        if reason is not None:
            raise UnsupportedError(f"kernel family '{self.name}' does not support {reason}")
        if config not in _members(self.spaces[target.arch]):
            raise UnsupportedError(f"{config} is not in the space of '{self.name}' for {target.arch}")
        sm_count = target.sm_count if self.bakes_sm_count(config) else None
        return KernelSpec.for_family(config, family, target.arch, sm_count)

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
def _members(space: Space) -> frozenset[Config]:
    return frozenset(space())


@lru_cache(maxsize=16)
def _source_digest(package: str, sources: str, extra: str, entry_module: str) -> str:
    """sha256 over the package's sources and those that turn them into an object here."""
    kernels = package_digest(package, sources)
    if kernels is None:
        raise MissingPackageError(f"{package} is not installed", remedy=_remedy(extra))
    total = hashlib.sha256(kernels.encode())
    here = Path(__file__).parent
    for path in (here.joinpath(*entry_module.split(".")[2:]).with_suffix(".py"), here / "compiler.py"):
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()
