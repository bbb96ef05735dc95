"""What a source of kernels offers: a space of configs, a cost model, and a compiler to the uniform entry ABI.

The entry ABI: one tvm-ffi function per kernel, `(a[M, K], b[N, K], out[M, N], *epilogue tensors)`, in the
epilogue's operand order, on the stream of the tvm-ffi environment, with M, N, K and the row strides dynamic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gemmcache import codec
from gemmcache.errors import IntegrityError, UsageError
from gemmcache.problem import Problem, ProblemFamily
from gemmcache.target import Target

Param = int | str | bool | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Config:
    """One self-describing point of a kernel family's configuration space.

    `params` are (name, value) pairs in name order; values are integers, flags, texts or tuples of integers.
    """

    kernel_family: str
    params: tuple[tuple[str, Param], ...]

    @classmethod
    def of(cls, kernel_family: str, **params: Param) -> Config:
        return cls(kernel_family, tuple(sorted(params.items())))

    def __post_init__(self) -> None:
        names = [name for name, _ in self.params]
        if names != sorted(set(names)):
            raise UsageError(f"config of '{self.kernel_family}': parameters {names} are not unique and sorted")

    def __getitem__(self, name: str) -> Param:
        for key, value in self.params:
            if key == name:
                return value
        raise KeyError(name)

    def as_dict(self) -> dict[str, Param]:
        return dict(self.params)

    def to_value(self) -> dict[str, codec.Value]:
        return {"kernel_family": self.kernel_family, "params": dict(self.params)}

    @classmethod
    def from_fields(cls, fields: codec.Fields) -> Config:
        params = fields.sub("params").everything()
        pairs: list[tuple[str, Param]] = []
        for name in sorted(params):
            value = params[name]
            if isinstance(value, (list, tuple)) and not set(map(type, value)) - {int}:
                value = tuple(value)
            elif not isinstance(value, (bool, int, str)):
                raise fields.fail("params", f"has a '{name}' that can't be a {type(value).__name__}")
            pairs.append((name, value))
        config = cls(fields.text("kernel_family"), tuple(pairs))
        fields.done()
        return config

    @classmethod
    def at_a_glance(cls, value: object) -> Config | None:
        """The config if `value` is in order; None if it has to be read field by field, to say what is wrong."""
        if type(value) is not dict or value.keys() != {"kernel_family", "params"}:
            return None
        name, params = value["kernel_family"], value["params"]
        if type(name) is not str or type(params) is not dict or set(map(type, params)) - {str}:
            return None
        pairs: list[tuple[str, Param]] = []
        for key, param in params.items():
            kind = type(param)
            if kind is list:
                if set(map(type, param)) - {int}:
                    return None
                param = tuple(param)
            elif kind is not int and kind is not str and kind is not bool:
                return None
            pairs.append((key, param))
        pairs.sort()
        return cls(name, tuple(pairs))

    @classmethod
    def from_value(cls, value: object, where: str = "config") -> Config:
        try:
            return cls.from_fields(codec.Fields(value, where))
        except UsageError as error:
            raise IntegrityError(error.message) from error

    @property
    def digest(self) -> str:
        """sha256 that names this config."""
        return codec.digest("config", self.to_value())

    def __str__(self) -> str:
        def show(value: Param) -> str:
            if isinstance(value, tuple):
                return "x".join(map(str, value))
            return str(value).lower() if isinstance(value, bool) else str(value)

        return f"{self.kernel_family}[{' '.join(f'{k}={show(v)}' for k, v in self.params)}]"


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """Everything that determines a kernel's object besides the toolchain; m, n and k are dynamic."""

    config: Config
    arch: str
    #: Number of SMs where the kernel bakes it in, else None.
    sm_count: int | None
    a_dtype: str
    b_dtype: str
    out_dtype: str
    acc_dtype: str
    a_layout: str
    b_layout: str
    out_layout: str
    epilogue: str
    #: Declared limits: n and k are multiples of `divisibility` elements, pointers aligned to `align_bytes`.
    divisibility: int = 8
    align_bytes: int = 16

    def to_value(self) -> dict[str, codec.Value]:
        return {
            "config": self.config.to_value(),
            "arch": self.arch,
            "sm_count": self.sm_count,
            "a_dtype": self.a_dtype,
            "b_dtype": self.b_dtype,
            "out_dtype": self.out_dtype,
            "acc_dtype": self.acc_dtype,
            "a_layout": self.a_layout,
            "b_layout": self.b_layout,
            "out_layout": self.out_layout,
            "epilogue": self.epilogue,
            "divisibility": self.divisibility,
            "align_bytes": self.align_bytes,
        }

    @classmethod
    def from_fields(cls, fields: codec.Fields) -> KernelSpec:
        spec = cls(Config.from_fields(fields.sub("config")), *_spec_scalars(fields))
        fields.done()
        return spec

    @classmethod
    def at_a_glance(cls, value: object) -> KernelSpec | None:
        """The spec if `value` is in order; None if it has to be read field by field, to say what is wrong."""
        if type(value) is not dict or value.keys() != _SPEC_NAMES:
            return None
        config = Config.at_a_glance(value["config"])
        if config is None:
            return None
        try:
            # The kernels of a bundle differ in their configs; the rest is looked at once.
            return cls(config, *_checked_scalars(*[value[name] for name in _SPEC_SCALARS]))
        except (TypeError, IntegrityError):
            return None

    @property
    def operands(self) -> tuple[str, ...]:
        """Dtypes, layouts and epilogue, as `operands_of` gives them for a family of problems."""
        return tuple(getattr(self, name) for name in _SPEC_TEXTS)

    def serves(self, family: ProblemFamily) -> bool:
        """Whether a kernel of this spec computes `family`: the operands agree, n and k divide."""
        divides = family.n % self.divisibility == 0 and family.k % self.divisibility == 0
        return divides and self.operands == operands_of(family)

    @classmethod
    def for_family(
        cls, config: Config, family: ProblemFamily, arch: str, sm_count: int | None, divisibility: int = 8
    ) -> KernelSpec:
        """The spec of `config` for the dtypes, layouts and epilogue of `family`."""
        return cls(
            config=config,
            arch=arch,
            sm_count=sm_count,
            a_dtype=family.a_dtype,
            b_dtype=family.b_dtype,
            out_dtype=family.out_dtype,
            acc_dtype=family.acc_dtype,
            a_layout=family.a_layout,
            b_layout=family.b_layout,
            out_layout=family.out_layout,
            epilogue=str(family.epilogue),
            divisibility=divisibility,
        )


def operands_of(family: ProblemFamily) -> tuple[str, ...]:
    """What a kernel must be compiled for to compute `family`, besides n and k."""
    return tuple(str(getattr(family, name)) for name in _SPEC_TEXTS)


#: The fields that a spec shares with the families of problems it serves.
_SPEC_TEXTS = (
    "a_dtype",
    "b_dtype",
    "out_dtype",
    "acc_dtype",
    "a_layout",
    "b_layout",
    "out_layout",
    "epilogue",
)


#: The fields of a spec besides its config, in the order of the constructor.
_SPEC_SCALARS = ("arch", "sm_count", *_SPEC_TEXTS, "divisibility", "align_bytes")
_SPEC_NAMES = frozenset((*_SPEC_SCALARS, "config"))


def _spec_scalars(fields: codec.Fields) -> tuple[Any, ...]:
    return (
        fields.text("arch"),
        None if fields.raw("sm_count") is None else fields.integer("sm_count", low=1, high=4096),
        *(fields.text(name) for name in _SPEC_TEXTS),
        fields.integer("divisibility", low=1, high=1024),
        fields.integer("align_bytes", low=1, high=1024),
    )


@lru_cache(maxsize=256, typed=True)
def _checked_scalars(*scalars: Any) -> tuple[Any, ...]:
    return _spec_scalars(codec.Fields(dict(zip(_SPEC_SCALARS, scalars, strict=True)), "kernel spec"))


class KernelFamily(ABC):
    """A source of kernels. An out-of-tree one is a subclass, named by an entry point of the group
    `gemmcache.kernel_families`. Nothing here needs a GPU; only `compile` may import the compiler."""

    #: Short name, used in configs, records and manifests.
    name: str

    @abstractmethod
    def source_digest(self) -> str:
        """sha256 of the kernel sources (the package's and the adapter's). Raises `MissingPackageError`."""

    @abstractmethod
    def unsupported(self, family: ProblemFamily, target: Target) -> str | None:
        """Why no kernel of this source computes `family` on `target`; None if some do."""

    @abstractmethod
    def configs(self, family: ProblemFamily, target: Target) -> Iterator[Config]:
        """Every valid config for `family` on `target`, always in one order, simplest first."""

    @abstractmethod
    def spec(self, config: Config, family: ProblemFamily, target: Target) -> KernelSpec:
        """What must be compiled for `config`. Raises `UnsupportedError` for a config outside the space."""

    @abstractmethod
    def estimate_us(self, config: Config, problem: Problem, target: Target) -> float:
        """Run time in microseconds by the cost model; only the order among configs is relied on."""

    @abstractmethod
    def compile(self, spec: KernelSpec, function_name: str) -> bytes:
        """The relocatable object that exports `function_name` as a tvm-ffi function.

        Not thread-safe: one compile a process at a time. Raises `CompileError`, `MissingPackageError`.
        """
