"""Loading compiled kernels: the DSL's runtime library, then shared objects from memory. cutlass is never imported."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gemmcache.errors import IncompatibleError, MissingPackageError, ToolError

LIBRARY = "libcute_dsl_runtime.so"
MAJORS = (12, 13, 14)

_lock = threading.Lock()
_loaded: dict[int, ctypes.CDLL] = {}
_modules: dict[str, KernelModule] = {}
_spelling = itertools.count(1)


def runtime_package(cuda_major: int) -> str:
    """The pip package that brings the runtime library for kernels compiled for this CUDA major."""
    return f"nvidia-cutlass-dsl-libs-cu{cuda_major}"


def find_runtime_library(cuda_major: int) -> Path:
    """Path of the DSL's runtime library. Raises `MissingPackageError` that names the package to install."""
    package = runtime_package(cuda_major)
    if (path := _usual_path(cuda_major)) is not None:
        return path
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == LIBRARY:
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    others = [m for m in MAJORS if m != cuda_major and _installed(runtime_package(m))]
    found = f"; installed is {runtime_package(others[0])}, of another CUDA major" if others else ""
    raise MissingPackageError(
        f"{LIBRARY} for CUDA {cuda_major} is not installed{found}", remedy=f"pip install {package}"
    )


def _usual_path(cuda_major: int) -> Path | None:
    """Where the package has always put the library: reading its list of files takes longer than all else here."""
    found = find_spec("nvidia_cutlass_dsl")
    for folder in (found and found.submodule_search_locations) or ():
        path = Path(folder) / f"cu{cuda_major}" / "lib" / LIBRARY
        if path.is_file():
            return path
    return None


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


@contextlib.contextmanager
def preloading() -> Iterator[Callable[[int | None], None]]:
    """Gives a function that lets a thread map the runtime library for a CUDA major (None: does nothing), and waits for
    it at the end.

    Mapping it takes as long as decoding a manifest. It decides nothing: symbols become visible, and errors are told, in
    `load_runtime_library`.
    """
    threads: list[threading.Thread] = []

    def begin(cuda_major: int | None) -> None:
        if cuda_major is None or _loaded:
            return
        # A foreign call lets go of the interpreter's lock, which ctypes.CDLL holds while it loads. All else is done
        # here: a thread that computes waits for this one.
        dlopen = ctypes.CDLL(None).dlopen
        dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
        # A hint may fail: without the library, or where no thread can be had.
        with contextlib.suppress(MissingPackageError, RuntimeError):
            path = os.fsencode(find_runtime_library(cuda_major))
            thread = threading.Thread(target=dlopen, args=(path, os.RTLD_NOW | os.RTLD_LOCAL), daemon=True)
            thread.start()
            threads.append(thread)

    try:
        yield begin
    finally:
        for thread in threads:
            thread.join()


def load_runtime_library(cuda_major: int) -> None:
    """Loads the DSL's runtime library once a process, its symbols visible to the kernels' shared objects."""
    with _lock:
        if cuda_major in _loaded:
            return
        if _loaded:
            raise IncompatibleError(
                f"kernels for CUDA {next(iter(_loaded))} are loaded already, this bundle needs CUDA {cuda_major}",
                remedy="serve bundles of one CUDA major in a process",
            )
        path = find_runtime_library(cuda_major)
        try:
            _loaded[cuda_major] = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise ToolError(f"{path} can't be loaded: {error}") from error


class KernelModule:
    """A loaded shared object of kernels."""

    def __init__(self, module: Any, fd: int) -> None:
        self._module = module
        self._fd = fd

    def function(self, name: str) -> Callable[..., Any]:
        """The tvm-ffi function of that name. Raises `ToolError` if the object does not have it."""
        try:
            function: Callable[..., Any] = self._module.get_function(name)
        except (AttributeError, ValueError, RuntimeError) as error:
            raise ToolError(f"the kernels' shared object has no function '{name}'") from error
        return function


def load_module(digest: str, open_copy: Callable[[], int], cuda_major: int) -> KernelModule:
    """The shared object with that sha256, loaded once a process and never unloaded: launches may be in flight and
    captured graphs may hold its kernels. `open_copy` gives a sealed descriptor of its checked bytes, if it is needed.

    Loading through the descriptor runs the very bytes that were hashed, and works on mounts without exec. Raises
    `MissingPackageError` without the DSL's runtime library, `ToolError` if the object can't be loaded.
    """
    load_runtime_library(cuda_major)
    with _lock:
        if digest not in _modules:
            fd = open_copy()
            try:
                import tvm_ffi

                load = tvm_ffi.get_global_func("ffi.Module.load_from_file.so")
                # The dynamic loader knows libraries by the spelling of their paths, and takes whatever anyone loaded
                # through a descriptor of this number before. No other load of the process has this spelling.
                path = f"/proc/self/fd/{'./' * next(_spelling)}{fd}"
                _modules[digest] = KernelModule(load(path, "so"), fd)
            except (RuntimeError, OSError, ValueError) as error:
                os.close(fd)
                raise ToolError(f"the kernels' shared object can't be loaded: {error}") from error
            except BaseException:
                os.close(fd)
                raise
        return _modules[digest]
