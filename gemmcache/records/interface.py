"""Tuning records: what was measured, where, how, and what follows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median

from gemmcache import codec
from gemmcache.environment import Environment
from gemmcache.kernels.interface import Config
from gemmcache.problem import Problem
from gemmcache.target import Target

RECORD_FORMAT = 1

OK, WRONG, FAILED, FLAGGED = "ok", "wrong", "failed", "flagged"
KERNEL, LIBRARY = "kernel", "library"

#: The error of a trial whose output had NaN or infinity in it, or was off by more than this.
UNBOUNDED_ERROR = 1e9


#: Version of the protocol in `gemmcache.tuning`. A record of a newer one can't be judged here, and does not decode.
PROTOCOL = 3
#: Fields of the protocol by the version that brought them.
_SINCE = {2: ("decision_rounds", "prune_milli"), 3: ("calm_rounds", "pause_ms", "heavy_us")}


@dataclass(frozen=True, slots=True)
class MeasurementPolicy:
    """How a record was measured and judged; part of it. Ratios are thousandths: keys hold no floats."""

    #: Inputs rotate over at least this many times the L2 size.
    l2_multiple: int = 3
    #: Interleaved repeats of all candidates, of the finalists, and of challenger, incumbent and library at the end.
    screening_rounds: int = 2
    final_rounds: int = 7
    decision_rounds: int = 9
    #: The last of the decision's rounds, beside `decision_rounds`: each sample of a problem that takes the library
    #: `heavy_us` or longer comes after a pause, so that not only a GPU at its power limit decides.
    calm_rounds: int = 5
    pause_ms: int = 25
    heavy_us: int = 50
    #: Candidates whose estimate is more than this many thousandths of the smallest are not run; 0 runs all.
    prune_milli: int = 2100
    #: How many candidates of the screening go to the finals.
    finalists: int = 8
    #: Launches in one CUDA graph: at least this many, and enough for `min_graph_us`.
    min_launches: int = 4
    min_graph_us: int = 250
    #: Largest relative error ||out - ref|| / ||ref|| against an fp32 reference, in thousandths.
    max_error_milli: int = 10
    #: A winner must beat incumbent and library by more than this, in thousandths of the slower time.
    tie_milli: int = 5
    #: Rounds of the bootstrap behind confidence intervals, and its seed.
    bootstrap: int = 400
    seed: int = 0
    #: Version of the protocol in `gemmcache.tuning`. 1 ran all candidates, and finals decided; 2 had no calm rounds.
    version: int = PROTOCOL

    def __post_init__(self) -> None:
        for name in _later_than(self.version):
            object.__setattr__(self, name, 0)

    def to_value(self) -> dict[str, codec.Value]:
        later = _later_than(self.version)
        return {name: value for name, value in asdict(self).items() if name not in later}

    @classmethod
    def from_fields(cls, fields: codec.Fields) -> MeasurementPolicy:
        later = _later_than(fields.integer("version", low=1, high=PROTOCOL))
        policy = cls(**{n: 0 if n in later else fields.integer(n) for n in cls.__dataclass_fields__})
        fields.done()
        return policy


def _later_than(version: int) -> frozenset[str]:
    """Fields that a version of the protocol did not have; they read as 0."""
    return frozenset(name for since, names in _SINCE.items() if since > version for name in names)


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate's outcome. `samples_us` are microseconds a launch, one per interleaved round.

    `status`: `ok`; `wrong` (numbers outside the policy's error); `failed` (did not compile, crashed or hung);
    `flagged` (samples that can't be trusted). `error` is the largest relative error found, None if not
    checked; NaN, infinity and all above become `UNBOUNDED_ERROR`, since records hold finite numbers only.
    """

    config: Config
    status: str
    samples_us: tuple[float, ...] = ()
    error: float | None = None
    detail: str = ""

    def __post_init__(self) -> None:
        if self.error is not None and not self.error < UNBOUNDED_ERROR:
            object.__setattr__(self, "error", UNBOUNDED_ERROR)

    @property
    def us(self) -> float:
        """Median microseconds; infinity without samples."""
        return median(self.samples_us) if self.samples_us else float("inf")

    def to_value(self) -> dict[str, codec.Value]:
        return {
            "config": self.config.to_value(),
            "status": self.status,
            # An integer has other bytes than the equal float that decoding gives.
            "samples_us": [float(s) for s in self.samples_us],
            "error": None if self.error is None else float(self.error),
            "detail": self.detail,
        }

    @classmethod
    def from_fields(cls, fields: codec.Fields) -> Trial:
        trial = cls(
            config=Config.from_fields(fields.sub("config")),
            status=fields.choice("status", (OK, WRONG, FAILED, FLAGGED)),
            samples_us=_samples(fields, "samples_us"),
            error=fields.opt_number("error"),
            detail=fields.text("detail"),
        )
        fields.done()
        return trial


def _samples(fields: codec.Fields, name: str) -> tuple[float, ...]:
    samples = fields.items(name, most=4096)
    numbers = tuple(n for n in map(codec.finite, samples) if n is not None and n > 0)
    if len(numbers) != len(samples):
        raise fields.fail(name, "must hold positive finite numbers")
    return numbers


@dataclass(frozen=True, slots=True)
class TuningRecord:
    """The outcome of tuning one problem in one environment.

    `choice` is `kernel` or `library`; a chosen kernel is `trials[0].config`. Trials are the top candidates,
    best first, then the wrong and failed ones that would have been among them. `baseline_us` are the
    library's samples. `measured_at` is UTC in ISO 8601 (`2026-12-01T12:00:00Z`) and `conditions` are clocks,
    power and the like, as numbers by name; neither is part of a key.
    """

    problem: Problem
    environment: Environment
    policy: MeasurementPolicy
    choice: str
    trials: tuple[Trial, ...]
    baseline: str
    baseline_us: tuple[float, ...]
    measured_at: str
    conditions: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "conditions", tuple(sorted(self.conditions)))

    @property
    def library_us(self) -> float:
        """Median microseconds of the library."""
        return median(self.baseline_us)

    @property
    def winner(self) -> Trial | None:
        """The chosen kernel's trial; None where the library was chosen."""
        return self.trials[0] if self.choice == KERNEL else None

    @property
    def speedup(self) -> float:
        """Library time over the time of what was chosen: 1.0 where the library was chosen."""
        return self.library_us / self.winner.us if self.winner else 1.0

    def to_value(self) -> dict[str, codec.Value]:
        return {
            "format": RECORD_FORMAT,
            "problem": self.problem.to_value(),
            "environment": self.environment.to_value(),
            "policy": self.policy.to_value(),
            "choice": self.choice,
            "trials": [t.to_value() for t in self.trials],
            "baseline": self.baseline,
            "baseline_us": [float(s) for s in self.baseline_us],
            "measured_at": self.measured_at,
            "conditions": {name: float(value) for name, value in self.conditions},
        }

    @classmethod
    def from_fields(cls, fields: codec.Fields) -> TuningRecord:
        fields.integer("format", low=RECORD_FORMAT, high=RECORD_FORMAT)
        conditions = fields.sub("conditions")
        record = cls(
            problem=Problem.from_fields(fields.sub("problem")),
            environment=Environment.from_fields(fields.sub("environment")),
            policy=MeasurementPolicy.from_fields(fields.sub("policy")),
            choice=fields.choice("choice", (KERNEL, LIBRARY)),
            trials=tuple(Trial.from_fields(f) for f in fields.subs("trials", most=4096)),
            baseline=fields.text("baseline"),
            baseline_us=_samples(fields, "baseline_us"),
            measured_at=fields.text("measured_at"),
            conditions=tuple((name, conditions.number(name)) for name in sorted(conditions.extra())),
        )
        if not record.baseline_us:
            raise fields.fail("baseline_us", "is empty")
        if record.choice == KERNEL and (
            not record.trials or record.trials[0].status != OK or record.trials[0].us >= record.library_us
        ):
            raise fields.fail("choice", "names a kernel that did not beat the library in this very record")
        fields.done()
        return record

    @classmethod
    def from_value(cls, value: object, where: str = "tuning record") -> TuningRecord:
        return cls.from_fields(codec.Fields(value, where))

    @property
    def slot(self) -> str:
        """sha256 of what is looked up: the problem on the target. Records of other drivers share the slot."""
        return slot_digest(self.problem, self.environment.target)

    @property
    def digest(self) -> str:
        """sha256 that names this record: problem, environment and measurement policy."""
        return codec.digest(
            "tuning-record", [self.problem.to_value(), self.environment.to_value(), self.policy.to_value()]
        )


def slot_digest(problem: Problem, target: Target) -> str:
    """sha256 of a problem on a target: the key under which records are stored and found."""
    return codec.digest("record-slot", [problem.to_value(), target.key])
