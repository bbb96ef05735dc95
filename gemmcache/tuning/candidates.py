"""Where a tuner's candidates come from: compiled on the spot, or packed elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gemmcache.build.compile import Progress, compile_kernels
from gemmcache.build.link import link
from gemmcache.build.objects import ObjectCache
from gemmcache.bundle.fs import storage_errors
from gemmcache.codec import bytes_digest
from gemmcache.environment import Toolchain
from gemmcache.errors import MissingPackageError, StorageError
from gemmcache.kernels.identity import kernel_digest
from gemmcache.kernels.interface import Config, KernelFamily, KernelSpec
from gemmcache.problem import ProblemFamily
from gemmcache.records.interface import FAILED, Trial
from gemmcache.target import Host, Target
from gemmcache.tuning.interface import Candidate


@dataclass(frozen=True, slots=True)
class CandidateSet:
    """All candidates of one family of problems, compiled and linked.

    `library` is the path of their shared object and `library_digest` its sha256, both empty where there is none.
    `broken` are the trials of those that did not compile.
    """

    candidates: tuple[Candidate, ...]
    broken: tuple[Trial, ...]
    library: str
    library_digest: str

    @property
    def order(self) -> Mapping[Config, int]:
        return {c.config: c.order for c in self.candidates}


class CandidateSource(Protocol):
    """What a tuner asks for candidates. `families` are the kernel families that they are of, for their cost models."""

    @property
    def families(self) -> Sequence[KernelFamily]: ...

    def candidates(
        self, problem_family: ProblemFamily, target: Target, progress: Progress | None = None
    ) -> CandidateSet: ...


def candidate_specs(
    families: Sequence[KernelFamily], problem_family: ProblemFamily, target: Target
) -> list[KernelSpec]:
    """Specs of every valid config of every kernel family, in order, simplest first within a family."""
    return [
        family.spec(config, problem_family, target)
        for family in families
        for config in family.configs(problem_family, target)
    ]


class CompiledCandidates:
    """Compiles every valid config of `families` when a family of problems is first asked for. `folder` holds the linked
    candidates while the run lasts."""

    def __init__(
        self,
        families: Sequence[KernelFamily],
        cache: ObjectCache,
        toolchain: Toolchain,
        host: Host,
        folder: Path,
        jobs: int | None = None,
    ) -> None:
        self.families = families
        self.cache, self.toolchain, self.host, self.folder, self.jobs = cache, toolchain, host, folder, jobs
        self._sets: dict[tuple[KernelSpec, ...], CandidateSet] = {}

    def candidates(
        self, problem_family: ProblemFamily, target: Target, progress: Progress | None = None
    ) -> CandidateSet:
        """The compiled candidates of a family of problems; families that need the same kernels share them."""
        specs = candidate_specs(self.families, problem_family, target)
        key = tuple(specs)
        if key not in self._sets:
            self._sets[key] = self._compile(specs, progress)
        return self._sets[key]

    def _compile(self, specs: list[KernelSpec], progress: Progress | None) -> CandidateSet:
        digests = {kernel_digest(s, self.toolchain, self.host): s for s in specs}
        objects, errors = compile_kernels(digests, self.cache, jobs=self.jobs, progress=progress)
        candidates = tuple(
            Candidate(spec.config, digest, i) for i, (digest, spec) in enumerate(digests.items()) if digest in objects
        )
        for error in errors.values():
            # No fault of a candidate: recorded as one, it would hand the problem to the library for good.
            if isinstance(error, (MissingPackageError, StorageError)):
                raise error
        if errors and not objects:
            raise errors[min(errors)]
        broken = tuple(Trial(digests[d].config, FAILED, detail=str(e)[:500]) for d, e in sorted(errors.items()))
        if not objects:
            return CandidateSet((), broken, "", "")
        data = link(objects)
        path = self.folder / f"{bytes_digest(data)}.so"
        with storage_errors(f"can't write {path}"):
            path.write_bytes(data)
        return CandidateSet(candidates, broken, str(path), bytes_digest(data))
