"""Loading a bundle: verdict first, then the kernels; nothing is tuned and nothing is compiled."""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from pathlib import Path
from typing import Any, Literal

import torch

from gemmcache.bundle.interface import Part
from gemmcache.bundle.reader import BundleReader
from gemmcache.environment import driver_version, package_version
from gemmcache.errors import DeviceError, IncompatibleError, IntegrityError, MissError, StaleError, UsageError
from gemmcache.policy import Facts, Judgement, Verdict, judge
from gemmcache.runtime.counters import Counters
from gemmcache.runtime.devices import CudaDevices
from gemmcache.runtime.dispatch import Dispatcher, bind_kernels
from gemmcache.runtime.linear import Linear
from gemmcache.runtime.native import load_module, preloading
from gemmcache.target import detect_host, detect_target

STRICT = "GEMMCACHE_STRICT"


class StaleBundleWarning(UserWarning):
    """The bundle was made for another environment and is served all the same."""


def load(
    path: str | os.PathLike[str],
    *,
    on_miss: Literal["library", "raise"] = "library",
    on_stale: Literal["serve", "raise"] = "serve",
    device: int | None = None,
) -> Bundle:
    """Loads the bundle at `path` for CUDA `device` (the current one by default) and the others of its arch.

    `on_miss="raise"` raises `MissError` from calls that the bundle has no entry for, instead of calling the library;
    `on_stale="raise"` refuses a bundle made for another driver, product or the like. `GEMMCACHE_STRICT=1` in the
    environment means both.

    Raises `DeviceError` without a CUDA device, `IntegrityError` for a damaged bundle, `IncompatibleError` for a
    bundle that can't run here (before any of its code is loaded), `StaleError`, and `MissingPackageError` if the
    DSL's runtime library is not installed. Warns `StaleBundleWarning` once if it serves a stale bundle.
    """
    if on_miss not in ("library", "raise"):
        raise UsageError(f"on_miss is '{on_miss}'", remedy="'library' or 'raise'")
    if on_stale not in ("serve", "raise"):
        raise UsageError(f"on_stale is '{on_stale}'", remedy="'serve' or 'raise'")
    strict = os.environ.get(STRICT, "") not in ("", "0")
    with preloading() as preload, contextlib.closing(BundleReader.open(path, early=preload)) as reader:
        facts = detect_facts(device)
        part, judgement = choose_part(reader.manifest.parts, facts)
        if judgement.verdict is Verdict.STALE:
            text = f"bundle {Path(path).name} is stale: " + "; ".join(map(str, judgement.differences))
            if strict or on_stale == "raise":
                raise StaleError(text, remedy=judgement.differences[0].remedy)
            warnings.warn(text, StaleBundleWarning, stacklevel=2)
        return Bundle(reader, part, judgement, device=device, raise_on_miss=strict or on_miss == "raise")


def detect_facts(device: int | None = None) -> Facts:
    """What this process and `device` are, as far as the policy compares it. Raises `DeviceError` without a GPU."""
    if not torch.cuda.is_available():
        raise DeviceError(
            "no CUDA device is visible, so no kernel can be served",
            remedy="gemmcache inspect and verify work without one",
        )
    target = detect_target(torch.cuda.current_device() if device is None else device)
    return Facts.of_target(
        target,
        host=detect_host(),
        tvm_ffi=_tvm_ffi_version(),
        driver=driver_version(),
        cuda_runtime=torch.version.cuda,
    )


def _tvm_ffi_version() -> str | None:
    """The version of tvm-ffi: the module, which the kernels need anyway, says it sooner than metadata."""
    try:
        import tvm_ffi
    except ImportError:
        return None
    version = getattr(tvm_ffi, "__version__", None)
    return version if isinstance(version, str) else package_version("apache-tvm-ffi")


def part_facts(part: Part) -> Facts:
    """What a part was made for, as far as the policy compares it."""
    return Facts.of_target(
        part.target,
        host=part.host,
        tvm_ffi=part.toolchain.tvm_ffi,
        driver=part.driver,
        cuda_runtime=part.cuda_runtime,
    )


def choose_part(parts: tuple[Part, ...], facts: Facts) -> tuple[Part, Judgement]:
    """The part with the best verdict and the fewest differences, the first of equals.

    Raises `IncompatibleError` with the reasons and remedies if every part is refused.
    """
    judged = [(part, judge(part_facts(part), facts)) for part in parts]
    part, judgement = min(judged, key=lambda pair: (pair[1].verdict, len(pair[1].differences)))
    if judgement.verdict is Verdict.REFUSED:
        refused = [(p, d) for p, j in judged for d in j.reasons(Verdict.REFUSED)]
        raise IncompatibleError(
            "the bundle can't run here: " + "; ".join(f"{p.target}: {d}" for p, d in refused),
            remedy=refused[0][1].remedy,
        )
    return part, judgement


class Bundle:
    """A loaded bundle. Thread-safe; calls run on the current stream of their tensors' device."""

    def __init__(
        self, reader: BundleReader, part: Part, judgement: Judgement, *, device: int | None, raise_on_miss: bool
    ) -> None:
        self.manifest = reader.manifest
        self.digest = reader.digest
        self.part = part
        #: The verdict under which the bundle is served, with every difference.
        self.judgement = judgement
        self._device = device
        self._counters = Counters()
        kernels: dict[str, Any] = {}
        if part.blob is not None:
            if part.toolchain.cuda_major is None:
                raise IntegrityError("the manifest does not say which CUDA major the kernels need")
            blob = part.blob
            module = load_module(blob.digest, lambda: reader.load_blob_memfd(blob), part.toolchain.cuda_major)
            kernels = bind_kernels(part, module.function)
        self._dispatchers = {t.family: Dispatcher(t, kernels) for t in part.tables}
        self._linear = Linear(self._dispatchers, self._counters, CudaDevices(part.target.capability), raise_on_miss)
        #: `linear(x, w, bias=None, activation=None, residual=None, out=None, *, gate, scale_a, scale_b, out_dtype)`:
        #: see `gemmcache.runtime.linear.Linear`.
        self.linear = self._linear.__call__
        _mark_after_fork(self._linear)

    @property
    def counters(self) -> dict[str, int]:
        """How many calls each way served since loading; names as in `gemmcache.runtime.counters`."""
        return self._counters.snapshot()

    @property
    def dispatchers(self) -> dict[Any, Dispatcher]:
        """The dispatch table of each family of problems."""
        return dict(self._dispatchers)

    def warm_up(self, device: int | None = None) -> int:
        """Launches every kernel once, on zeros of one row, and waits: the first launch of a kernel loads its code.

        Runs on CUDA `device`, by default the one that the bundle was loaded for. Returns how many kernels it launched.
        """
        index = self._device if device is None else device
        return self._linear.warm_up(torch.device("cuda", torch.cuda.current_device() if index is None else index))


#: The calls of all loaded bundles, to be marked in a forked child.
_loaded: weakref.WeakSet[Linear] = weakref.WeakSet()
_registered = False


def _mark_after_fork(linear: Linear) -> None:
    global _registered
    if not _registered:
        os.register_at_fork(after_in_child=_forked)
        _registered = True
    _loaded.add(linear)


def _forked() -> None:
    for linear in _loaded:
        linear.forked = True


__all__ = ["Bundle", "MissError", "StaleBundleWarning", "load"]
