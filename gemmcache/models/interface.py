"""What every source of problems gives: layers with their families of problems, and the traffic of each m."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gemmcache import codec
from gemmcache.epilogue import Epilogue
from gemmcache.errors import UsageError
from gemmcache.ladder import DEFAULT_MS, Ladder
from gemmcache.problem import MAX_DIM, Problem, ProblemFamily

#: How tensor parallelism splits a layer: the weight's rows (column parallel), its columns, or not at all.
COLUMN, ROW, REPLICATED = "column", "row", "replicated"
PARALLEL = (COLUMN, ROW, REPLICATED)
#: Which families the layers of a model have: without proposed epilogues, with them, or both.
PLAIN, PROPOSED, BOTH = "none", "model", "both"
EPILOGUES = (PLAIN, PROPOSED, BOTH)


@dataclass(frozen=True, slots=True)
class Layer:
    """A GEMM of the source: its module path (or definition's name), and how often one forward pass runs it.

    `path` has `*` for the layer index where `count` layers share one family. After a split by tensor
    parallelism `family` is one rank's. `proposed` is the epilogue that the model has after this GEMM, bias
    included; None where the source says nothing of what comes after.
    """

    path: str
    family: ProblemFamily
    count: int = 1
    parallel: str = REPLICATED
    proposed: Epilogue | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"layer {self.path}: count is {self.count}, not at least 1")
        if self.parallel not in PARALLEL:
            raise UsageError(f"layer {self.path}: parallel is '{self.parallel}', not one of {', '.join(PARALLEL)}")

    def to_value(self) -> dict[str, codec.Value]:
        """The map that the canonical encoder takes; the inverse of `from_fields`."""
        return {
            "path": self.path,
            "family": self.family.to_value(),
            "count": self.count,
            "parallel": self.parallel,
            "proposed": None if self.proposed is None else str(self.proposed),
        }

    @classmethod
    def from_fields(cls, fields: codec.Fields) -> Layer:
        """Reads a layer out of `fields`, complete and with nothing unknown."""
        layer = cls(
            path=fields.text("path"),
            family=ProblemFamily.from_fields(fields.sub("family")),
            count=fields.integer("count", low=1),
            parallel=fields.choice("parallel", PARALLEL),
            proposed=_proposed(fields),
        )
        fields.done()
        return layer

    def fused(self) -> Layer:
        """This layer with the proposed epilogue in its family; itself where there is none."""
        if self.proposed is None:
            return self
        return replace(self, family=replace(self.family, epilogue=self.proposed))


@dataclass(frozen=True, slots=True)
class Workload:
    """The GEMMs of one source.

    `m_weights` maps a family to its (m, share of its traffic) pairs, ascending in m and with a sum of 1,
    where the source knows traffic; families that it does not hold are tuned at `ladder`'s default ms.
    `notes` are what a user of the proposed epilogues should know about how they were found.
    """

    name: str
    layers: tuple[Layer, ...]
    m_weights: tuple[tuple[ProblemFamily, tuple[tuple[int, float], ...]], ...] = ()
    notes: tuple[str, ...] = ()

    def with_epilogues(self, choice: str) -> Workload:
        """This workload with its layers as they are ("none"), with the epilogues proposed ("model"), or each
        layer that these change twice, plain and fused, both with its full count ("both").

        Layers without a proposal, such as those of lists and traces, stay as they are.
        Raises `UsageError` for another `choice`.
        """
        if choice not in EPILOGUES:
            raise UsageError(f"epilogues is {choice!r}", remedy=f"one of {', '.join(EPILOGUES)}")
        plain = choice != PROPOSED
        layers: list[Layer] = []
        for layer in self.layers:
            versions = ([layer] if plain else []) + ([layer.fused()] if choice != PLAIN else [])
            layers.extend(dict.fromkeys(versions))
        return replace(self, layers=tuple(layers))

    def families(self) -> dict[ProblemFamily, int]:
        """Each family once, in order of appearance, with its count per forward pass."""
        counts: dict[ProblemFamily, int] = {}
        for layer in self.layers:
            counts[layer.family] = counts.get(layer.family, 0) + layer.count
        return counts

    def ms(self, family: ProblemFamily, override: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """The ms to tune `family` at: `override` if given, else the source's own, else `DEFAULT_MS`."""
        if override:
            return override
        own = dict(self.m_weights).get(family)
        return tuple(m for m, _ in own) if own else DEFAULT_MS

    def problems(self, override: tuple[int, ...] | None = None) -> dict[Problem, float]:
        """Every problem with its weight: the family's count times the m's share of its traffic.

        Shares are equal where the source knows no traffic. With `override`, each m of the traffic counts for
        the tuned m that answers for it; what none answers for is left out, unless that is all of it.
        """
        weights: dict[Problem, float] = {}
        for family, count in self.families().items():
            ms = self.ms(family, override)
            shares = self.shares(family, override) or [1.0 / len(ms)] * len(ms)
            weights.update({family.at(m): count * share for m, share in zip(ms, shares, strict=True)})
        return weights

    def in_tuning_order(self, override: tuple[int, ...] | None = None) -> list[Problem]:
        """Every problem: by family, so that a family's weights are made once; families that run most often first."""
        counts = self.families()
        return sorted(self.problems(override), key=lambda p: (-counts[p.family], str(p.family), p.m))

    def shares(self, family: ProblemFamily, override: tuple[int, ...] | None = None) -> list[float] | None:
        """The share of the traffic that each of `ms(family, override)` answers for; None if none is known."""
        ms = self.ms(family, override)
        ladder = Ladder.of(ms)
        shares = dict.fromkeys(ms, 0.0)
        for m, share in dict(self.m_weights).get(family, ()):
            entry, _ = ladder.locate(m)
            if entry is not None:
                shares[ladder.bounds[entry]] += share
        return list(shares.values()) if any(shares.values()) else None

    def to_value(self) -> dict[str, codec.Value]:
        """The map that the canonical encoder takes (with floats allowed); the inverse of `from_value`."""
        return {
            "name": self.name,
            "layers": [layer.to_value() for layer in self.layers],
            "m_weights": [
                {
                    "family": family.to_value(),
                    "ms": [m for m, _ in pairs],
                    "shares": [share for _, share in pairs],
                }
                for family, pairs in self.m_weights
            ],
            "notes": list(self.notes),
        }

    @classmethod
    def from_value(cls, value: object, where: str = "workload") -> Workload:
        """The workload that `to_value` wrote. Raises `IntegrityError` for anything else."""
        fields = codec.Fields(value, where)
        workload = cls(
            name=fields.text("name"),
            layers=tuple(Layer.from_fields(f) for f in fields.subs("layers")),
            m_weights=tuple(_weights(f) for f in fields.subs("m_weights")),
            notes=_notes(fields),
        )
        fields.done()
        return workload


def _proposed(fields: codec.Fields) -> Epilogue | None:
    text = fields.opt_text("proposed")
    try:
        return None if text is None else Epilogue.parse(text)
    except UsageError as error:
        raise fields.kind(f"{fields.where}: field 'proposed': {error.message}", remedy=error.remedy) from error


def _notes(fields: codec.Fields) -> tuple[str, ...]:
    notes = fields.items("notes")
    if not all(isinstance(note, str) for note in notes):
        raise fields.fail("notes", "must hold text")
    return tuple(notes)


def _weights(fields: codec.Fields) -> tuple[ProblemFamily, tuple[tuple[int, float], ...]]:
    family = ProblemFamily.from_fields(fields.sub("family"))
    ms, shares = fields.items("ms"), fields.items("shares")
    if not ms or not all(type(m) is int and 1 <= m <= MAX_DIM for m in ms) or sorted(set(ms)) != ms:
        raise fields.fail("ms", "must hold positive integers in ascending order")
    if len(shares) != len(ms) or not all(type(s) is float and s > 0 for s in shares):
        raise fields.fail("shares", "must hold one positive number for each m")
    fields.done()
    return family, tuple(zip(ms, shares, strict=True))
