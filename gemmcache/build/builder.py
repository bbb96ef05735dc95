"""Building a bundle: plan, compile, link, publish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmcache._version import __version__
from gemmcache.build.compile import Progress, compile_kernels
from gemmcache.build.link import link
from gemmcache.build.objects import ObjectCache
from gemmcache.build.plan import TargetPlan
from gemmcache.bundle.interface import Blob, Kernel, Manifest, Part
from gemmcache.bundle.reader import BundleReader
from gemmcache.bundle.writer import check_destination, publish
from gemmcache.codec import bytes_digest
from gemmcache.environment import Toolchain
from gemmcache.errors import CompileError
from gemmcache.kernels.interface import KernelSpec
from gemmcache.target import Host


@dataclass(frozen=True, slots=True)
class Built:
    """A published bundle: its folder, digest and manifest; bytes of blobs, and how many kernels the cache had."""

    folder: Path
    digest: str
    manifest: Manifest
    blob_bytes: int
    compiled: int
    cached: int


def build(
    name: str,
    plans: Sequence[TargetPlan],
    folder: Path,
    *,
    toolchain: Toolchain,
    host: Host,
    cache: ObjectCache,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Built:
    """Compiles what `plans` (one per target) need and publishes the bundle in `folder`.

    The same plans, sources and toolchain give the same bytes. Raises `CompileError` if a kernel does not compile,
    `ToolError` if linking fails, `StorageError`, and `UsageError` if `folder` holds something else; whatever was
    in `folder` stays as it was.
    """
    check_destination(folder)
    specs: dict[str, KernelSpec] = {}
    for plan in plans:
        specs.update(plan.specs)
    hits = 0

    def count(digest: str, cached: bool) -> None:
        nonlocal hits
        hits += cached
        if progress:
            progress(digest, cached)

    objects, errors = compile_kernels(specs, cache, jobs=jobs, progress=count)
    if errors:
        first = errors[min(errors)]
        raise CompileError(
            f"{len(errors)} of {len(specs)} kernels did not compile: {first.message}", remedy=first.remedy
        )
    blobs: dict[str, bytes] = {}
    parts = []
    for plan in plans:
        blob = None
        if plan.specs:
            data = link({d: objects[d] for d in plan.specs})
            blob = Blob(bytes_digest(data), len(data))
            blobs[blob.digest] = data
        parts.append(
            Part(
                target=plan.target,
                host=host,
                toolchain=toolchain,
                driver=plan.driver,
                cuda_runtime=plan.cuda_runtime,
                blob=blob,
                kernels=tuple(Kernel(d, plan.specs[d]) for d in sorted(plan.specs)),
                tables=plan.tables,
            )
        )
    manifest = Manifest(name=name, version=1, generator=f"gemmcache {__version__}", parts=tuple(parts))
    digest = publish(folder, manifest, blobs, renumber=True)
    with BundleReader.open(folder) as reader:
        if reader.digest == digest:
            manifest = reader.manifest
    return Built(
        folder=folder,
        digest=digest,
        manifest=manifest,
        blob_bytes=sum(map(len, blobs.values())),
        compiled=len(specs) - hits,
        cached=hits,
    )
