"""Compiling many kernels: a pool of processes in front of the object cache.

Processes, because two threads that compile abort the process, and because a compiler that aborts must cost its
kernel and not the run.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess

from gemmcache.build.objects import ObjectCache
from gemmcache.bundle.interface import function_name, symbol_name
from gemmcache.errors import CompileError, GemmcacheError
from gemmcache.kernels.interface import KernelSpec
from gemmcache.kernels.registry import kernel_family

#: Called with the digest of each kernel that is ready, and whether the cache had it.
Progress = Callable[[str, bool], None]


def compile_one(digest: str, spec: KernelSpec) -> bytes:
    """Compiles one kernel in this process. Whatever goes wrong is a `GemmcacheError` that names the kernel."""
    function = function_name(digest)
    try:
        data = kernel_family(spec.config.kernel_family).compile(spec, function)
    except GemmcacheError:
        raise
    except Exception as error:
        # Kernel families are plug-ins: what they raise need not even survive the way to the parent.
        raise CompileError(f"{spec.config} for {spec.arch}: {type(error).__name__}: {error}") from error
    # Symbol names end in a zero byte in the object. Without its symbol the kernel would be missed at load only.
    if not isinstance(data, bytes) or symbol_name(function).encode() + b"\0" not in data:
        raise CompileError(f"{spec.config} for {spec.arch}: the object does not export {symbol_name(function)}")
    return data


def _start_worker() -> None:
    """Set-up of a worker: the parent handles the keyboard, and a parent that is killed takes its workers along.

    A worker holds both ends of its queue, so it would wait there for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _pool(workers: int) -> ProcessPoolExecutor:
    # The fork server's socket lies in the temporary folder and must have a path of at most 107 bytes.
    fits = len(os.fsencode(tempfile.gettempdir())) + len("/pymp-12345678/listener-12345678") <= 107
    context = multiprocessing.get_context("forkserver" if fits else "spawn")
    # The compiler is imported once, in the fork server; workers inherit it.
    context.set_forkserver_preload(["gemmcache.kernels.operators.entry"])
    return ProcessPoolExecutor(max_workers=workers, mp_context=context, initializer=_start_worker)


def compile_kernels(
    specs: Mapping[str, KernelSpec],
    cache: ObjectCache,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, bytes], dict[str, GemmcacheError]]:
    """Objects by kernel digest, and the errors of those that did not compile.

    `jobs` processes at most, one a CPU by default. A kernel whose compilation kills its process is found by
    compiling those that the broken pool had under way one at a time.
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
            data = future.result()
            cache.put(digest, data)
            objects[digest] = data
        except BrokenProcessPool:
            raise
        except GemmcacheError as error:
            errors[digest] = error
        if progress:
            progress(digest, False)

    while missing:
        workers = max(1, min(jobs or os.cpu_count() or 1, len(missing)))
        try:
            with _pool(workers) as pool:
                futures = {pool.submit(compile_one, d, s): d for d, s in missing.items()}
                try:
                    for future in as_completed(futures):
                        done(futures[future], future)
                except BaseException:
                    # An interrupt waits for the kernels under way, not for the whole queue. Leaving the block would
                    # take back what shutdown(cancel_futures=True) had asked for.
                    for future in futures:
                        future.cancel()
                    raise
        except BrokenProcessPool:
            # Kernels are taken in order, and one more than there are workers is handed out: the culprit is among these.
            suspects = [d for d in missing if d not in objects and d not in errors][: workers + 1]
            for digest in suspects:
                _compile_alone(digest, missing[digest], done, errors)
        missing = {d: s for d, s in missing.items() if d not in objects and d not in errors}
    return objects, errors


def _compile_alone(
    digest: str, spec: KernelSpec, done: Callable[[str, Future[bytes]], None], errors: dict[str, GemmcacheError]
) -> None:
    try:
        with _pool(1) as pool:
            done(digest, pool.submit(compile_one, digest, spec))
    except BrokenProcessPool:
        errors[digest] = CompileError(f"{spec.config} for {spec.arch}: the compiler process died")
