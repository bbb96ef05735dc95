"""Compiling many kernels: a pool of processes in front of the object cache.

Processes, because two threads that compile abort the process, and because a compiler that aborts must cost its
kernel and not the run.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from gemmcache.build.objects import ObjectCache
from gemmcache.bundle.interface import function_name
from gemmcache.errors import CompileError, GemmcacheError
from gemmcache.kernels.interface import KernelSpec
from gemmcache.kernels.registry import kernel_family

#: Called with the digest of each kernel that is ready, and whether the cache had it.
Progress = Callable[[str, bool], None]


def compile_one(digest: str, spec: KernelSpec) -> bytes:
    """Compiles one kernel in this process."""
    return kernel_family(spec.config.kernel_family).compile(spec, function_name(digest))


def _pool(workers: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("forkserver")
    # The compiler is imported once, in the fork server; workers inherit it.
    context.set_forkserver_preload(["gemmcache.kernels.operators.entry"])
    return ProcessPoolExecutor(max_workers=workers, mp_context=context)


def compile_kernels(
    specs: Mapping[str, KernelSpec],
    cache: ObjectCache,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, bytes], dict[str, GemmcacheError]]:
    """Objects by kernel digest, and the errors of those that did not compile.

    `jobs` processes at most, one a CPU by default. A kernel whose compilation kills its process is found by
    compiling what the broken pool left behind one at a time.
    """
    objects: dict[str, bytes] = {}
    errors: dict[str, GemmcacheError] = {}
    missing: dict[str, KernelSpec] = {}
    for digest in sorted(specs):
        cached = cache.get(digest)
        if cached is None:
            missing[digest] = specs[digest]
        else:
            objects[digest] = cached
            if progress:
                progress(digest, True)

    def done(digest: str, future: Future[bytes]) -> None:
        try:
            objects[digest] = future.result()
            cache.put(digest, objects[digest])
        except BrokenProcessPool:
            raise
        except GemmcacheError as error:
            errors[digest] = error
        if progress:
            progress(digest, False)

    if missing:
        workers = max(1, min(jobs or os.cpu_count() or 1, len(missing)))
        try:
            with _pool(workers) as pool:
                futures = {pool.submit(compile_one, d, s): d for d, s in missing.items()}
                for future in as_completed(futures):
                    done(futures[future], future)
        except BrokenProcessPool:
            for digest in [d for d in missing if d not in objects and d not in errors]:
                _compile_alone(digest, missing[digest], done, errors)
    return objects, errors


def _compile_alone(
    digest: str, spec: KernelSpec, done: Callable[[str, Future[bytes]], None], errors: dict[str, GemmcacheError]
) -> None:
    try:
        with _pool(1) as pool:
            done(digest, pool.submit(compile_one, digest, spec))
    except BrokenProcessPool:
        errors[digest] = CompileError(f"{spec.config} for {spec.arch}: the compiler process died")
