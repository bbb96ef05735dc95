"""A tuning pack: candidates compiled and linked on any machine, to be measured on one that has no compiler.

A pack is a zip file. `pack.msgpack` holds, in the canonical encoding, what was compiled for which problems, with which
toolchain, target and host; each other member is a shared object of candidates under its sha256. Nothing in it is run
before the environment was judged and the bytes were hashed.
"""

from __future__ import annotations

import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemmcache import codec
from gemmcache.build.compile import Progress
from gemmcache.bundle.fs import storage_errors
from gemmcache.bundle.interface import MAX_BLOB_BYTES, Blob
from gemmcache.environment import Toolchain
from gemmcache.errors import IncompatibleError, IntegrityError, UsageError
from gemmcache.kernels.interface import Config, KernelFamily
from gemmcache.kernels.registry import known_families
from gemmcache.policy import Facts, Verdict, judge
from gemmcache.problem import Problem, ProblemFamily
from gemmcache.records.interface import Trial
from gemmcache.target import Host, Target
from gemmcache.tuning.candidates import CandidateSet, CompiledCandidates
from gemmcache.tuning.interface import Candidate

FORMAT, MAJOR = "gemmcache-pack", 1
MANIFEST = "pack.msgpack"
MAX_MANIFEST_BYTES = 64 << 20
MAX_FAMILIES, MAX_CANDIDATES, MAX_PROBLEMS = 1 << 12, 1 << 14, 1 << 16
#: What zipfile raises for damaged, encrypted and unknown archives.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    KeyError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
)
#: The same for each member, so that equal packs are equal bytes.
_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class PackedSet:
    """The candidates of some families of problems. `blob` is their shared object, None where nothing compiled."""

    families: tuple[ProblemFamily, ...]
    candidates: tuple[Candidate, ...]
    broken: tuple[Trial, ...]
    blob: Blob | None

    def to_value(self) -> dict[str, codec.Value]:
        return {
            "families": [f.to_value() for f in self.families],
            "candidates": [
                {"config": c.config.to_value(), "kernel": c.kernel, "order": c.order} for c in self.candidates
            ],
            "broken": [t.to_value() for t in self.broken],
            "blob": self.blob.to_value() if self.blob else None,
        }

    @classmethod
    def from_fields(cls, fields: codec.Fields) -> PackedSet:
        candidates = []
        for sub in fields.subs("candidates", most=MAX_CANDIDATES):
            config = Config.from_fields(sub.sub("config"))
            candidates.append(Candidate(config, sub.digest("kernel"), sub.integer("order", high=MAX_CANDIDATES)))
        blob = None if fields.raw("blob") is None else Blob.from_fields(fields.sub("blob"))
        if bool(candidates) != (blob is not None):
            raise fields.fail("blob", "must be given where there are candidates, and only there")
        return cls(
            tuple(ProblemFamily.from_fields(f) for f in fields.subs("families", most=MAX_FAMILIES)),
            tuple(candidates),
            tuple(Trial.from_fields(f) for f in fields.subs("broken", most=MAX_CANDIDATES)),
            blob,
        )


@dataclass(frozen=True, slots=True)
class Pack:
    """What a pack says of itself. `problems` in the order in which they are to be tuned."""

    name: str
    target: Target
    host: Host
    toolchain: Toolchain
    problems: tuple[Problem, ...]
    sets: tuple[PackedSet, ...]

    def encode(self) -> bytes:
        value = {
            "format": FORMAT,
            "major": MAJOR,
            "name": self.name,
            "target": self.target.to_value(),
            "host": self.host.to_value(),
            "toolchain": self.toolchain.to_value(),
            "problems": [p.to_value() for p in self.problems],
            "sets": [s.to_value() for s in self.sets],
        }
        return codec.encode(value, floats=True)

    @classmethod
    def decode(cls, data: bytes) -> Pack:
        value: Any = codec.decode(data, floats=True, max_bytes=MAX_MANIFEST_BYTES, what="pack")
        fields = codec.Fields(value, "pack")
        if fields.text("format") != FORMAT:
            raise fields.fail("format", f"is not '{FORMAT}'")
        major = fields.integer("major")
        if major != MAJOR:
            raise IncompatibleError(
                f"the pack has format version {major}, this gemmcache reads {MAJOR}",
                remedy="upgrade gemmcache" if major > MAJOR else "make the pack again",
            )
        try:
            pack = cls(
                name=fields.text("name"),
                target=Target.from_fields(fields.sub("target")),
                host=Host.from_fields(fields.sub("host")),
                toolchain=Toolchain.from_fields(fields.sub("toolchain")),
                problems=tuple(Problem.from_fields(f) for f in fields.subs("problems", most=MAX_PROBLEMS)),
                sets=tuple(PackedSet.from_fields(f) for f in fields.subs("sets", most=MAX_FAMILIES)),
            )
        except UsageError as error:
            raise IntegrityError(f"pack: {error.message}") from error
        packed = [f for s in pack.sets for f in s.families]
        if len(set(packed)) != len(packed) or not {p.family for p in pack.problems} <= set(packed):
            raise fields.fail("sets", "do not hold each family of the problems once")
        return pack

    @property
    def kernel_families(self) -> frozenset[str]:
        """Names of the kernel families that candidates are of."""
        return frozenset(c.config.kernel_family for s in self.sets for c in s.candidates)

    def check_runs_on(self, target: Target, host: Host, tvm_ffi: str | None) -> None:
        """Raises `IncompatibleError` unless its candidates can run, by the policy, on a machine like `host` with this
        version of tvm-ffi, and are for the product that `target` is: what wins on another is no record of this one."""
        made_for = Facts.of_target(self.target, host=self.host, tvm_ffi=self.toolchain.tvm_ffi)
        here = Facts.of_target(target, host=host, tvm_ffi=tvm_ffi)
        found = [
            d
            for d in judge(made_for, here).differences
            if d.verdict is Verdict.REFUSED or d.field in ("product", "sm_count")
        ]
        if found:
            raise IncompatibleError(
                "the pack can't be measured here: " + "; ".join(map(str, found)),
                remedy="make a pack for this machine: gemmcache pack --target",
            )


def make_pack(
    path: Path,
    name: str,
    problems: Sequence[Problem],
    target: Target,
    compiled: CompiledCandidates,
    progress: Progress | None = None,
) -> Pack:
    """Compiles all candidates of `problems` and writes them to the file `path`, which is replaced at once.

    Raises what compiling raises, and `StorageError` if the file can't be written.
    """
    found: dict[CandidateSet, list[ProblemFamily]] = {}
    for family in dict.fromkeys(p.family for p in problems):
        found.setdefault(compiled.candidates(family, target, progress), []).append(family)
    sets, libraries = [], {}
    for made, families in found.items():
        blob = None
        if made.library:
            blob = Blob(made.library_digest, Path(made.library).stat().st_size)
            libraries[blob.digest] = made.library
        sets.append(PackedSet(tuple(families), made.candidates, made.broken, blob))
    pack = Pack(name, target, compiled.host, compiled.toolchain, tuple(problems), tuple(sets))
    with storage_errors(f"can't write {path}"):
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(_member(MANIFEST), pack.encode())
                for digest in sorted(libraries):
                    archive.writestr(_member(digest), Path(libraries[digest]).read_bytes())
            with open(temporary, "rb") as written:
                os.fsync(written.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    return pack


def _member(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _DATE)
    info.compress_type = zipfile.ZIP_DEFLATED
    info.external_attr = 0o644 << 16
    return info


class PackedCandidates:
    """The candidates of an opened pack; shared objects are unpacked into `folder` when they are first asked for.

    `families` are those of its kernel families whose cost models are known here; candidates of others are not pruned.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self.folder = path, folder
        self.pack = read_pack(path)
        self.families: Sequence[KernelFamily] = known_families(self.pack.kernel_families)
        self._by_family = {f: s for s in self.pack.sets for f in s.families}

    def candidates(
        self, problem_family: ProblemFamily, target: Target, progress: Progress | None = None
    ) -> CandidateSet:
        """The packed candidates of a family of problems.

        Raises `UsageError` for a family that was not packed, `IntegrityError` for a shared object that is damaged.
        """
        packed = self._by_family.get(problem_family)
        if packed is None:
            raise UsageError(
                f"{problem_family} is not in the pack", remedy="tune the pack's own problems, or pack again"
            )
        if packed.blob is None:
            return CandidateSet((), packed.broken, "", "")
        library = self.folder / f"{packed.blob.digest}.so"
        if not library.exists():
            data = _read(self.path, packed.blob.digest, packed.blob.size)
            if codec.bytes_digest(data) != packed.blob.digest:
                raise IntegrityError(
                    f"{self.path}: {packed.blob.digest} does not have the bytes that its name stands for",
                    remedy="copy the pack again, or make it again",
                )
            with storage_errors(f"can't write {library}"):
                library.write_bytes(data)
        return CandidateSet(packed.candidates, packed.broken, str(library), packed.blob.digest)


def read_pack(path: Path) -> Pack:
    """What the pack at `path` says of itself. Raises `UsageError` if none is there, `IntegrityError` for a damaged
    one, `IncompatibleError` for another major format, `StorageError` if it can't be read."""
    return Pack.decode(_read(path, MANIFEST, MAX_MANIFEST_BYTES))


def _read(path: Path, member: str, most: int) -> bytes:
    """The bytes of one member, `most` of them at most whatever the archive says of its sizes."""
    with storage_errors(f"can't read {path}"):
        try:
            with zipfile.ZipFile(path) as archive, archive.open(member) as file:
                data = file.read(min(most, MAX_BLOB_BYTES) + 1)
        except FileNotFoundError:
            raise UsageError(f"{path} does not exist", remedy="name a file that gemmcache pack wrote") from None
        except _DAMAGE as error:
            raise IntegrityError(f"{path} is not a tuning pack, or damaged: {error}") from error
    if len(data) > most:
        raise IntegrityError(f"{path}: {member} is larger than the {most} bytes it may have")
    return data
