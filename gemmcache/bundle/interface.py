"""The manifest: a bundle's table of contents, as values with a canonical encoding.

`docs/bundle-format.md` is the specification; this module is its only encoder and decoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemmcache import codec
from gemmcache.environment import Toolchain
from gemmcache.errors import IncompatibleError, IntegrityError, UsageError
from gemmcache.kernels.interface import KernelSpec
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

KERNEL, LIBRARY = "kernel", "library"
TUNED, PREDICTED = "tuned", "predicted"


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
    """A compiled kernel: the digest of spec and toolchain, and its function `gc_<first 32 hex digits>` in the blob."""

    digest: str
    spec: KernelSpec

    @property
    def function(self) -> str:
        return function_name(self.digest)

    def to_value(self) -> dict[str, codec.Value]:
        return {"digest": self.digest, "spec": self.spec.to_value()}

    @classmethod
    def from_fields(cls, fields: codec.Fields) -> Kernel:
        return cls(fields.digest("digest"), KernelSpec.from_fields(fields.sub("spec")))


def function_name(kernel_digest: str) -> str:
    """The exported symbol of a kernel."""
    return f"gc_{kernel_digest[:32]}"


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
            "us": self.us,
            "library_us": self.library_us,
            "error": self.error,
        }

    @classmethod
    def from_fields(cls, fields: codec.Fields) -> Entry:
        entry = cls(
            m=fields.integer("m", low=1, high=(1 << 31) - 1),
            choice=fields.choice("choice", (KERNEL, LIBRARY)),
            origin=fields.choice("origin", (TUNED, PREDICTED)),
            kernel=fields.opt_digest("kernel"),
            record=fields.opt_digest("record"),
            us=fields.opt_number("us"),
            library_us=fields.opt_number("library_us"),
            error=fields.opt_number("error"),
        )
        if (entry.choice == KERNEL) != (entry.kernel is not None):
            raise fields.fail("kernel", "must be given for the choice 'kernel', and only for it")
        if (entry.origin == TUNED) != (entry.record is not None):
            raise fields.fail("record", "must be given for the origin 'tuned', and only for it")
        return entry


@dataclass(frozen=True, slots=True)
class DispatchTable:
    """The entries of one family of problems, ascending in m. `count` is how often a forward pass runs the family."""

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
            entries=tuple(Entry.from_fields(f) for f in fields.subs("entries", most=MAX_ENTRIES)),
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

    `driver` and `cuda_runtime` are those of the tuning records (None if they differ among records or there are
    none). `blob` is None where every entry is the library's. Kernels are sorted by digest, tables by family digest.
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
        part = cls(
            target=Target.from_fields(fields.sub("target")),
            host=Host.from_fields(fields.sub("host")),
            toolchain=Toolchain.from_fields(fields.sub("toolchain")),
            driver=fields.opt_text("driver"),
            cuda_runtime=fields.opt_text("cuda_runtime"),
            blob=None if fields.raw("blob") is None else Blob.from_fields(fields.sub("blob")),
            kernels=tuple(Kernel.from_fields(f) for f in fields.subs("kernels", most=MAX_KERNELS)),
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
        return part


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

        Raises `IntegrityError` for anything malformed or inconsistent, `IncompatibleError` for a newer major format.
        Fields that a newer minor version added to maps of this format are accepted and ignored, except inside
        keys (problem families, targets, hosts, kernel specs), which must be complete and known.
        """
        value: Any = codec.decode(data, floats=True, max_bytes=MAX_MANIFEST_BYTES, what="manifest")
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
                version=fields.integer("version", low=1),
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
        return manifest

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """Every blob once, sorted by digest."""
        return tuple(sorted({p.blob for p in self.parts if p.blob}, key=lambda b: (b.digest, b.size)))
