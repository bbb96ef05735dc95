"""The manifest: a bundle's table of contents, as values with a canonical encoding.

`docs/bundle-format.md` is the specification; this module is its only encoder and decoder.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gemmcache import codec
from gemmcache.environment import Toolchain
from gemmcache.errors import IncompatibleError, IntegrityError, UsageError
from gemmcache.kernels.interface import KernelSpec, operands_of
from gemmcache.ladder import Ladder
from gemmcache.problem import ProblemFamily
from gemmcache.target import Host, Target

FORMAT = "gemmcache-bundle"
MAJOR, MINOR = 1, 0

MAX_MANIFEST_BYTES = 16 << 20
MAX_BLOB_BYTES = 1 << 30
MAX_PARTS = 64
MAX_KERNELS = 1 << 14
MAX_TABLES = 1 << 14
MAX_ENTRIES = 1 << 12
MAX_VERSION = (1 << 53) - 1
#: Lists, maps and items in them: more than fit in MAX_MANIFEST_BYTES with the keys of this format.
MAX_TOTAL = 1 << 21

KERNEL, LIBRARY = "kernel", "library"
TUNED, PREDICTED = "tuned", "predicted"


#: A field of a toolchain as it is encoded, and its value: a small integer is one byte.
_CUDA_MAJOR = re.compile(rb"\xaacuda_major([\x01-\x63])", re.DOTALL)


def hinted_cuda_major(data: bytes) -> int | None:
    """The CUDA major that the bytes of a manifest seem to ask for, unchecked; None if they name none, or several."""
    majors = {found[0] for found in _CUDA_MAJOR.findall(data)}
    return majors.pop() if len(majors) == 1 else None


@dataclass(frozen=True, slots=True)
class Blob:
    """A file of the bundle, named by the sha256 of its bytes. `size` in bytes."""

    digest: str
    size: int

    def to_value(self) -> dict[str, codec.Value]:
        return {"digest": self.digest, "size": self.size}

    @classmethod
    def from_fields(cls, fields: codec.Fields) -> Blob:
        return cls(fields.digest("digest"), fields.integer("size", low=1, high=MAX_BLOB_BYTES))


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel: its digest, which names its function in the blob, and what was compiled."""

    digest: str
    spec: KernelSpec

    @property
    def function(self) -> str:
        return function_name(self.digest)

    @property
    def symbol(self) -> str:
        return symbol_name(self.function)

    def to_value(self) -> dict[str, codec.Value]:
        return {"digest": self.digest, "spec": self.spec.to_value()}

    @classmethod
    def from_fields(cls, fields: codec.Fields) -> Kernel:
        return cls(fields.digest("digest"), KernelSpec.from_fields(fields.sub("spec")))

    @classmethod
    def all_of(cls, fields: codec.Fields, name: str) -> tuple[Kernel, ...]:
        """The kernels in the list `name` of `fields`. A bundle has hundreds: one that is in order is read at once."""
        kernels = []
        for i, value in enumerate(fields.items(name, most=MAX_KERNELS)):
            spec = None
            if type(value) is dict and codec.is_digest(value.get("digest")):
                spec = KernelSpec.at_a_glance(value.get("spec"))
            kernels.append(cls.from_fields(fields.item(name, i)) if spec is None else cls(value["digest"], spec))
        return tuple(kernels)


def function_name(digest: str) -> str:
    """The tvm-ffi function of the kernel with this digest."""
    return f"gc_{digest[:32]}"


def symbol_name(function: str) -> str:
    """The dynamic symbol under which a shared object exports a tvm-ffi function."""
    return f"__tvm_ffi_{function}"


@dataclass(frozen=True, slots=True)
class Entry:
    """What serves the ms of one step of a ladder.

    `choice` is `kernel` (then `kernel` is its digest) or `library`; `origin` is `tuned` (then `record` is the
    tuning record's digest, and times in microseconds and the relative error are its medians) or `predicted`.
    """

    m: int
    choice: str
    origin: str
    kernel: str | None = None
    record: str | None = None
    us: float | None = None
    library_us: float | None = None
    error: float | None = None

    def to_value(self) -> dict[str, codec.Value]:
        return {
            "m": self.m,
            "choice": self.choice,
            "origin": self.origin,
            "kernel": self.kernel,
            "record": self.record,
            "us": _opt_float(self.us),
            "library_us": _opt_float(self.library_us),
            "error": _opt_float(self.error),
        }

    @classmethod
    def all_of(cls, fields: codec.Fields, name: str) -> tuple[Entry, ...]:
        """The entries in the list `name` of `fields`; one that is in order is read at once."""
        return tuple(
            cls(**value) if _plain_entry(value) else cls.from_fields(fields.item(name, i))
            for i, value in enumerate(fields.items(name, most=MAX_ENTRIES))
        )

    @classmethod
    def from_fields(cls, fields: codec.Fields) -> Entry:
        _given(fields, "kernel", "record")
        entry = cls(
            m=fields.integer("m", low=1, high=(1 << 31) - 1),
            choice=fields.choice("choice", (KERNEL, LIBRARY)),
            origin=fields.choice("origin", (TUNED, PREDICTED)),
            kernel=fields.opt_digest("kernel"),
            record=fields.opt_digest("record"),
            us=_measured(fields, "us"),
            library_us=_measured(fields, "library_us"),
            error=_measured(fields, "error", zero=True),
        )
        if (entry.choice == KERNEL) != (entry.kernel is not None):
            raise fields.fail("kernel", "must be given for the choice 'kernel', and only for it")
        if (entry.origin == TUNED) != (entry.record is not None):
            raise fields.fail("record", "must be given for the origin 'tuned', and only for it")
        return entry


_ENTRY_NAMES = frozenset(Entry.__dataclass_fields__)
_MAX_M = (1 << 31) - 1


def _plain_entry(row: Mapping[str, Any]) -> bool:
    """Whether an entry is in order at a glance; one that is not is read field by field, to say what is wrong."""
    if type(row) is not dict or row.keys() != _ENTRY_NAMES:
        return False
    kernel, record = row["kernel"], row["record"]
    return (
        type(row["m"]) is int
        and 1 <= row["m"] <= _MAX_M
        and (row["choice"] == KERNEL if codec.is_digest(kernel) else kernel is None and row["choice"] == LIBRARY)
        and (row["origin"] == TUNED if codec.is_digest(record) else record is None and row["origin"] == PREDICTED)
        and all(row[name] is None or (type(row[name]) is float and row[name] > 0) for name in _MEASURED)
    )


_MEASURED = ("us", "library_us", "error")


def _given(fields: codec.Fields, *names: str) -> None:
    """Refuses a map without these fields: nil must be written, or a damaged name would pass for it."""
    for name in names:
        fields.raw(name)


def _opt_float(value: float | None) -> float | None:
    # An integral number must not get the bytes of an integer; zero has no sign.
    return None if value is None else float(value) + 0.0


def _measured(fields: codec.Fields, name: str, *, zero: bool = False) -> float | None:
    """A float64 above zero (or zero, where `zero`), or None."""
    value = fields.raw(name)
    if value is None:
        return None
    if not isinstance(value, float):
        raise fields.fail(name, f"must be a float, not {type(value).__name__}")
    if value < 0 or (value == 0 and not zero) or (value == 0 and math.copysign(1, value) < 0):
        raise fields.fail(name, f"is {value}, which no measurement gives")
    return value


@dataclass(frozen=True, slots=True)
class DispatchTable:
    """The entries of one family of problems, ascending in m. A forward pass runs the family `count` times."""

    family: ProblemFamily
    entries: tuple[Entry, ...]
    count: int = 1

    @property
    def ladder(self) -> Ladder:
        return Ladder(tuple(e.m for e in self.entries))

    def to_value(self) -> dict[str, codec.Value]:
        return {
            "family": self.family.to_value(),
            "count": self.count,
            "entries": [e.to_value() for e in self.entries],
        }

    @classmethod
    def from_fields(cls, fields: codec.Fields) -> DispatchTable:
        table = cls(
            family=ProblemFamily.from_fields(fields.sub("family")),
            entries=Entry.all_of(fields, "entries"),
            count=fields.integer("count", low=1, high=1 << 31),
        )
        try:
            _ = table.ladder
        except UsageError as error:
            raise fields.fail("entries", f"do not form a ladder: {error.message}") from error
        return table


@dataclass(frozen=True, slots=True)
class Part:
    """All that a bundle holds for one target: the environment it was made for, one blob, kernels and tables.

    `driver` and `cuda_runtime` are those of the tuning records (None if they differ among records or there
    are none). `blob` is None where every entry is the library's. Kernels are sorted by digest, tables by
    family digest.
    """

    target: Target
    host: Host
    toolchain: Toolchain
    driver: str | None
    cuda_runtime: str | None
    blob: Blob | None
    kernels: tuple[Kernel, ...]
    tables: tuple[DispatchTable, ...]

    def to_value(self) -> dict[str, codec.Value]:
        return {
            "target": self.target.to_value(),
            "host": self.host.to_value(),
            "toolchain": self.toolchain.to_value(),
            "driver": self.driver,
            "cuda_runtime": self.cuda_runtime,
            "blob": self.blob.to_value() if self.blob else None,
            "kernels": [k.to_value() for k in self.kernels],
            "tables": [t.to_value() for t in self.tables],
        }

    @classmethod
    def from_fields(cls, fields: codec.Fields) -> Part:
        _given(fields, "driver", "cuda_runtime")
        part = cls(
            target=Target.from_fields(fields.sub("target")),
            host=Host.from_fields(fields.sub("host")),
            toolchain=Toolchain.from_fields(fields.sub("toolchain")),
            driver=fields.opt_text("driver"),
            cuda_runtime=fields.opt_text("cuda_runtime"),
            blob=None if fields.raw("blob") is None else Blob.from_fields(fields.sub("blob")),
            kernels=Kernel.all_of(fields, "kernels"),
            tables=tuple(DispatchTable.from_fields(f) for f in fields.subs("tables", most=MAX_TABLES)),
        )
        digests = [k.digest for k in part.kernels]
        if digests != sorted(set(digests)):
            raise fields.fail("kernels", "are not unique and sorted by digest")
        families = [t.family.digest for t in part.tables]
        if families != sorted(set(families)):
            raise fields.fail("tables", "are not unique and sorted by family digest")
        used = {e.kernel for t in part.tables for e in t.entries if e.kernel}
        if used != set(digests):
            raise fields.fail("kernels", "and the kernels that entries name are not the same set")
        if bool(digests) != (part.blob is not None):
            raise fields.fail("blob", "must be given where there are kernels, and only there")
        if len({k.function for k in part.kernels}) != len(digests):
            raise fields.fail("kernels", "has two kernels with one function name")
        part._check_specs(fields)
        return part

    def _check_specs(self, fields: codec.Fields) -> None:
        """Refuses a kernel that was made for other operands or another GPU than it would be called with."""
        specs = {k.digest: k.spec for k in self.kernels}
        for digest, spec in specs.items():
            if spec.arch != self.target.arch or spec.sm_count not in (None, self.target.sm_count):
                raise fields.fail("kernels", f"has kernel {digest}, which is not for {self.target}")
        limits = {digest: (spec.operands, spec.divisibility) for digest, spec in specs.items()}
        for table in self.tables:
            n, k, operands = table.family.n, table.family.k, operands_of(table.family)
            for digest in {e.kernel for e in table.entries if e.kernel}:
                made_for, divisor = limits[digest]
                if made_for != operands or n % divisor or k % divisor:
                    raise fields.fail("tables", f"gives {table.family} the kernel {digest}, not made for it")


@dataclass(frozen=True, slots=True)
class Manifest:
    """A bundle's table of contents. `version` grows with every publication under one name."""

    name: str
    version: int
    generator: str
    parts: tuple[Part, ...]

    def to_value(self) -> dict[str, codec.Value]:
        return {
            "format": FORMAT,
            "major": MAJOR,
            "minor": MINOR,
            "name": self.name,
            "version": self.version,
            "generator": self.generator,
            "parts": [p.to_value() for p in self.parts],
        }

    def encode(self) -> bytes:
        """The bytes of the manifest file; their sha256 is the bundle's digest."""
        return codec.encode(self.to_value(), floats=True)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Reads a manifest file's bytes.

        Raises `IntegrityError` for anything malformed or inconsistent, `IncompatibleError` for another major
        format. Fields that a newer minor version added to maps of this format are accepted and ignored,
        except inside keys (problem families, targets, hosts, kernel specs), which must be complete and known.
        """
        value: Any = codec.decode(
            data,
            floats=True,
            max_bytes=MAX_MANIFEST_BYTES,
            max_total=MAX_TOTAL,
            what="manifest",
        )
        fields = codec.Fields(value, "manifest")
        if fields.text("format") != FORMAT:
            raise fields.fail("format", f"is not '{FORMAT}'")
        major = fields.integer("major")
        if major != MAJOR:
            raise IncompatibleError(
                f"the bundle has format version {major}, this gemmcache reads {MAJOR}",
                remedy="upgrade gemmcache" if major > MAJOR else "build the bundle again",
            )
        fields.integer("minor")
        try:
            manifest = cls(
                name=fields.text("name"),
                version=fields.integer("version", low=1, high=MAX_VERSION),
                generator=fields.text("generator"),
                parts=tuple(Part.from_fields(f) for f in fields.subs("parts", most=MAX_PARTS)),
            )
        except UsageError as error:
            raise IntegrityError(f"manifest: {error.message}") from error
        if not manifest.parts:
            raise fields.fail("parts", "is empty")
        keys = [codec.digest("part", [p.target.to_value(), p.host.to_value()]) for p in manifest.parts]
        if len(set(keys)) != len(keys):
            raise fields.fail("parts", "has two parts for one target and host")
        if len({b.digest for b in manifest.blobs}) != len(manifest.blobs):
            raise fields.fail("parts", "give one blob two sizes")
        return manifest

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """Every blob once, sorted by digest."""
        return tuple(sorted({p.blob for p in self.parts if p.blob}, key=lambda b: (b.digest, b.size)))
