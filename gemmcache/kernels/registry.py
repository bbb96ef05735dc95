"""Kernel families by name, from the entry point group `gemmcache.kernel_families`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib import metadata

from gemmcache.errors import UnsupportedError, UsageError
from gemmcache.kernels.interface import KernelFamily
from gemmcache.kernels.operators import OperatorsFamily
from gemmcache.kernels.quack import QuackFamily
from gemmcache.kernels.quack.family import installed as quack_installed

GROUP = "gemmcache.kernel_families"

#: Built in, so that they are there without installed package metadata.
_BUILT_IN: dict[str, type[KernelFamily]] = {"operators": OperatorsFamily, "quack": QuackFamily}


@lru_cache(maxsize=1)
def kernel_families() -> dict[str, KernelFamily]:
    """All families, sorted by name. A broken plug-in raises `UnsupportedError` that names it."""
    families: dict[str, KernelFamily] = {name: made() for name, made in _BUILT_IN.items()}
    if not quack_installed():
        # An extra of its own: without it its records wait, and the next best serves.
        del families["quack"]
    origins: dict[str, str] = {}
    for point in metadata.entry_points(group=GROUP):
        if point.name in _BUILT_IN:
            continue
        if origins.setdefault(point.name, point.value) != point.value:
            raise UnsupportedError(
                f"kernel family '{point.name}' is both {origins[point.name]} and {point.value}",
                remedy="uninstall one of them",
            )
        try:
            loaded = point.load()
            if not (isinstance(loaded, type) and issubclass(loaded, KernelFamily)):
                raise TypeError("it is not a class derived from KernelFamily")
            families[point.name] = loaded()
            if families[point.name].name != point.name:
                raise TypeError(f"its name is '{loaded.name}'")
        except Exception as error:
            # Importing and making it runs code of others, which can raise anything.
            raise UnsupportedError(
                f"kernel family '{point.name}' ({point.value}) can't be loaded: {error}", remedy="uninstall or fix it"
            ) from error
    return dict(sorted(families.items()))


def chosen_families(names: Sequence[str]) -> list[KernelFamily]:
    """The installed families of these names, all of them if there are none. Raises `UsageError` for another name."""
    installed = kernel_families()
    unknown = [name for name in names if name not in installed]
    if unknown:
        raise UsageError(f"kernel family '{unknown[0]}' is not installed", remedy=f"installed: {', '.join(installed)}")
    return [family for name, family in installed.items() if not names or name in names]


def known_families(names: Iterable[str]) -> list[KernelFamily]:
    """Those of `names` whose spaces and cost models are known here, whether or not their packages are installed."""
    known: dict[str, KernelFamily] = {**kernel_families()}
    for name, made in _BUILT_IN.items():
        known.setdefault(name, made())
    return [known[name] for name in sorted(names) if name in known]


def kernel_family(name: str) -> KernelFamily:
    """The family of that name. Raises `UnsupportedError` for another name."""
    families = kernel_families()
    if name not in families:
        raise UnsupportedError(f"kernel family '{name}' is not installed", remedy=f"installed: {', '.join(families)}")
    return families[name]
