"""What is computed: `out[M, N'] = epilogue(a[M, K] @ b[N, K].T)`, and the digests that name it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from gemmcache import codec, dtypes
from gemmcache.epilogue import Epilogue
from gemmcache.errors import UsageError

MAX_DIM = (1 << 31) - 1

#: Layouts by dimension names, slowest first: a is M x K, b is N x K, out is M x N.
A_LAYOUTS = ("mk", "km")
B_LAYOUTS = ("nk", "kn")
OUT_LAYOUTS = ("mn", "nm")

_TEXTS = ("a_dtype", "b_dtype", "out_dtype", "acc_dtype", "a_layout", "b_layout", "out_layout")


@dataclass(frozen=True, slots=True)
class ProblemFamily:
    """A problem without m: what one layer needs. The weight is `b[N, K]`, as `torch.nn.Linear` stores it."""

    n: int
    k: int
    a_dtype: str = "bfloat16"
    b_dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    acc_dtype: str = "float32"
    batch: int = 1
    a_layout: str = "mk"
    b_layout: str = "nk"
    out_layout: str = "mn"
    epilogue: Epilogue = field(default_factory=Epilogue)

    def __post_init__(self) -> None:
        for name in ("n", "k", "batch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_DIM:
                raise UsageError(f"problem: {name} is {value!r}, not an integer in 1..{MAX_DIM}")
        for name in ("a_dtype", "b_dtype", "out_dtype", "acc_dtype"):
            if getattr(self, name) not in dtypes.SIZES:
                raise UsageError(f"problem: {name} '{getattr(self, name)}' is not a known dtype")
        for name, allowed in (("a_layout", A_LAYOUTS), ("b_layout", B_LAYOUTS), ("out_layout", OUT_LAYOUTS)):
            if getattr(self, name) not in allowed:
                raise UsageError(f"problem: {name} '{getattr(self, name)}' is not one of {', '.join(allowed)}")
        self.epilogue.out_columns(self.n)

    @classmethod
    def of(
        cls, n: int, k: int, dtype: str = "bfloat16", epilogue: str = "none", out: str | None = None
    ) -> ProblemFamily:
        """The family for operands of one dtype (names or aliases), out of the same unless given."""
        name = dtypes.dtype_name(dtype)
        return cls(
            n=n,
            k=k,
            a_dtype=name,
            b_dtype=name,
            out_dtype=dtypes.dtype_name(out) if out else name,
            acc_dtype=dtypes.accumulator_for(name),
            epilogue=Epilogue.parse(epilogue),
        )

    def at(self, m: int) -> Problem:
        """The problem of this family with `m` rows of a."""
        return Problem(self, m)

    def to_value(self) -> dict[str, codec.Value]:
        """The map that the canonical encoder takes; the inverse of `from_value`."""
        return {**{k: v for k, v in asdict(self).items() if k != "epilogue"}, "epilogue": str(self.epilogue)}

    @classmethod
    def from_fields(cls, fields: codec.Fields) -> ProblemFamily:
        """Reads a family out of `fields`, complete and with nothing unknown."""
        sizes = {name: fields.integer(name, low=1, high=MAX_DIM) for name in ("n", "k", "batch")}
        texts = {name: fields.text(name) for name in _TEXTS}
        epilogue = fields.text("epilogue")
        try:
            family = cls(**sizes, **texts, epilogue=Epilogue.parse(epilogue))  # type: ignore[arg-type]
        except UsageError as error:
            raise fields.kind(f"{fields.where}: {error.message}", remedy=error.remedy) from error
        if str(family.epilogue) != epilogue:
            raise fields.fail("epilogue", "is not in canonical form")
        fields.done()
        return family

    @classmethod
    def from_value(cls, value: object, where: str = "problem family") -> ProblemFamily:
        return cls.from_fields(codec.Fields(value, where))

    @property
    def digest(self) -> str:
        """sha256 that names this family; any field changes it."""
        return codec.digest("problem-family", self.to_value())

    @property
    def out_columns(self) -> int:
        """Columns of out: n, or n/2 under a gate."""
        return self.epilogue.out_columns(self.n)

    def __str__(self) -> str:
        kinds = self.a_dtype if self.a_dtype == self.b_dtype else f"{self.a_dtype}x{self.b_dtype}"
        out = "" if self.out_dtype == self.a_dtype else f"->{self.out_dtype}"
        batch = "" if self.batch == 1 else f" batch {self.batch}"
        layouts = f"{self.a_layout},{self.b_layout},{self.out_layout}"
        layouts = "" if layouts == "mk,nk,mn" else f" {layouts}"
        epilogue = f" {self.epilogue}" if self.epilogue else ""
        return f"{self.n}x{self.k} {kinds}{out}{batch}{layouts}{epilogue}"


@dataclass(frozen=True, slots=True)
class Problem:
    """A family of problems at one m: the unit that is tuned."""

    family: ProblemFamily
    m: int

    def __post_init__(self) -> None:
        if isinstance(self.m, bool) or not isinstance(self.m, int) or not 1 <= self.m <= MAX_DIM:
            raise UsageError(f"problem: m is {self.m!r}, not an integer in 1..{MAX_DIM}")

    @property
    def flops(self) -> int:
        """Multiply-adds counted as two operations, epilogue left out."""
        return 2 * self.m * self.family.n * self.family.k * self.family.batch

    @property
    def min_bytes(self) -> int:
        """Bytes moved if a and b are read once and out is written once (epilogue tensors left out)."""
        f, size = self.family, dtypes.SIZES
        return f.batch * (
            self.m * f.k * size[f.a_dtype] + f.n * f.k * size[f.b_dtype] + self.m * f.out_columns * size[f.out_dtype]
        )

    def to_value(self) -> dict[str, codec.Value]:
        return {"family": self.family.to_value(), "m": self.m}

    @classmethod
    def from_fields(cls, fields: codec.Fields) -> Problem:
        problem = cls(ProblemFamily.from_fields(fields.sub("family")), fields.integer("m", low=1, high=MAX_DIM))
        fields.done()
        return problem

    @classmethod
    def from_value(cls, value: object, where: str = "problem") -> Problem:
        return cls.from_fields(codec.Fields(value, where))

    @property
    def digest(self) -> str:
        """sha256 that names this problem; any field changes it."""
        return codec.digest("problem", self.to_value())

    def __str__(self) -> str:
        return f"{self.m}x{self.family}"
