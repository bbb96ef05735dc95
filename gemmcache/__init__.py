"""gemmcache: tune GEMMs once, compile the winners ahead of time, serve them from a verified bundle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemmcache._version import __version__

if TYPE_CHECKING:
    from gemmcache.runtime.loader import Bundle, load

__all__ = ["Bundle", "__version__", "load"]


def __getattr__(name: str) -> object:
    # torch is imported by the first use of the loader, not by `import gemmcache`.
    if name in ("Bundle", "load"):
        from gemmcache.runtime import loader

        return getattr(loader, name)
    raise AttributeError(f"module 'gemmcache' has no attribute '{name}'")
