"""The compatibility policy: one table from differences to verdicts, for load, check, build and records."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from gemmcache.environment import Environment
from gemmcache.target import Host, Target


class Verdict(IntEnum):
    """In order of severity; the verdict over several differences is the largest."""

    OK = 0
    STALE = 1
    REFUSED = 2


@dataclass(frozen=True, slots=True)
class Rule:
    """What a difference in one field means: `verdict` if both sides are known and differ."""

    field: str
    verdict: Verdict
    unknown: Verdict
    remedy: str


#: Order is that of reports. `unknown` applies when either side does not know the value.
RULES: tuple[Rule, ...] = (
    Rule("arch", Verdict.REFUSED, Verdict.REFUSED, "build a bundle for this GPU: gemmcache build --target"),
    Rule("host", Verdict.REFUSED, Verdict.REFUSED, "build the bundle on a machine of this CPU's level or lower"),
    Rule("tvm_ffi", Verdict.REFUSED, Verdict.STALE, "install the apache-tvm-ffi minor version of the bundle"),
    Rule("sm_count", Verdict.STALE, Verdict.STALE, "tune on this GPU and build again"),
    Rule("product", Verdict.STALE, Verdict.STALE, "tune on this GPU and build again"),
    Rule("driver", Verdict.STALE, Verdict.STALE, "tune again under this driver, then build"),
    Rule("cuda_runtime", Verdict.STALE, Verdict.STALE, "tune again with this CUDA runtime, then build"),
)


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which a bundle and its surroundings differ."""

    field: str
    expected: str | None
    found: str | None
    verdict: Verdict
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: made for {self.expected or 'unknown'}, found {self.found or 'unknown'}"

    def to_value(self) -> dict[str, str | None]:
        return {
            "field": self.field,
            "expected": self.expected,
            "found": self.found,
            "verdict": self.verdict.name.lower(),
            "remedy": self.remedy,
        }


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict and every difference behind it."""

    differences: tuple[Difference, ...]

    @property
    def verdict(self) -> Verdict:
        return max((d.verdict for d in self.differences), default=Verdict.OK)

    def reasons(self, verdict: Verdict) -> tuple[Difference, ...]:
        return tuple(d for d in self.differences if d.verdict is verdict)

    def to_value(self) -> dict[str, object]:
        return {"verdict": self.verdict.name.lower(), "differences": [d.to_value() for d in self.differences]}


@dataclass(frozen=True, slots=True)
class Facts:
    """The fields that the rules compare, on one side; None is unknown."""

    arch: str | None = None
    host: Host | None = None
    tvm_ffi: str | None = None
    sm_count: int | None = None
    product: str | None = None
    driver: str | None = None
    cuda_runtime: str | None = None

    @classmethod
    def of_target(cls, target: Target, **others: str | Host | None) -> Facts:
        """The facts of a target; `others` are the remaining fields by name."""
        return cls(target.arch, sm_count=target.sm_count, product=target.product, **others)  # type: ignore[arg-type]

    @classmethod
    def of_environment(cls, environment: Environment, host: Host | None) -> Facts:
        return cls.of_target(
            environment.target,
            host=host,
            tvm_ffi=environment.toolchain.tvm_ffi,
            driver=environment.driver,
            cuda_runtime=environment.cuda_runtime,
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _same(field: str, expected: object, found: object) -> bool:
    if field == "host" and isinstance(expected, Host) and isinstance(found, Host):
        return expected.runs_on(found)
    if field == "tvm_ffi" and isinstance(expected, str) and isinstance(found, str):
        # Its C ABI holds within a minor version.
        return _minor(expected) == _minor(found)
    return expected == found


def _shown(value: object) -> str | None:
    if isinstance(value, Host):
        return f"{value.arch} {value.isa} {value.libc}"
    return None if value is None else str(value)


def judge(expected: Facts, found: Facts) -> Judgement:
    """Compares what a bundle was made for (`expected`) with its surroundings (`found`)."""
    differences = []
    for rule in RULES:
        a, b = getattr(expected, rule.field), getattr(found, rule.field)
        if a is None or b is None:
            verdict = rule.unknown
        elif _same(rule.field, a, b):
            continue
        else:
            verdict = rule.verdict
        differences.append(Difference(rule.field, _shown(a), _shown(b), verdict, rule.remedy))
    return Judgement(tuple(differences))
