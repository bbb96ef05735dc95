"""Kernel families by name, from the entry point group `gemmcache.kernel_families`."""

from __future__ import annotations

from functools import lru_cache
from importlib import metadata

from gemmcache.errors import UnsupportedError
from gemmcache.kernels.interface import KernelFamily
from gemmcache.kernels.operators import OperatorsFamily

GROUP = "gemmcache.kernel_families"

#: Built in, so that they are there without installed package metadata.
_BUILT_IN: dict[str, type[KernelFamily]] = {"operators": OperatorsFamily}


@lru_cache(maxsize=1)
def kernel_families() -> dict[str, KernelFamily]:
    """All families, sorted by name. A broken plug-in raises `UnsupportedError` that names it."""
    classes: dict[str, type[KernelFamily]] = dict(_BUILT_IN)
    for point in metadata.entry_points(group=GROUP):
        if point.name in _BUILT_IN:
            continue
        try:
            loaded = point.load()
        except (ImportError, AttributeError) as error:
            raise UnsupportedError(
                f"kernel family '{point.name}' ({point.value}) can't be loaded: {error}", remedy="uninstall or fix it"
            ) from error
        if not (isinstance(loaded, type) and issubclass(loaded, KernelFamily)) or loaded.name != point.name:
            raise UnsupportedError(f"'{point.value}' is not a KernelFamily named '{point.name}'")
        classes[point.name] = loaded
    return {name: classes[name]() for name in sorted(classes)}


def kernel_family(name: str) -> KernelFamily:
    """The family of that name. Raises `UnsupportedError` for another name."""
    families = kernel_families()
    if name not in families:
        raise UnsupportedError(f"kernel family '{name}' is not installed", remedy=f"installed: {', '.join(families)}")
    return families[name]
