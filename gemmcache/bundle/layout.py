"""What may lie in a bundle's folder, and how much of it; `docs/bundle-format.md` has the rules in words."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gemmcache.bundle import fs
from gemmcache.bundle.interface import MAX_PARTS
from gemmcache.codec import is_digest
from gemmcache.errors import IntegrityError

MANIFEST = "manifest.msgpack"
BLOBS = "blobs"

#: Names in one folder: live blobs, those of a publication under way, and a generous rest of killed ones.
MAX_NAMES = 16 * MAX_PARTS

#: Written by a publication that was killed, or is under way.
_TEMP = re.compile(r"\.tmp-[0-9a-f]{16}")
#: A removed file that someone on the same NFS client still has open.
_NFS = re.compile(r"\.nfs[0-9a-f]{8,32}")


def is_temp(name: str) -> bool:
    """Whether `name` is that of a file which no reader looks at and any writer may remove."""
    return _TEMP.fullmatch(name) is not None


def stray(top: Iterable[tuple[str, bool]], blobs: Iterable[tuple[str, bool]]) -> str | None:
    """The first name that does not belong into a bundle, None if all do.

    `top` and `blobs` are (name, is a regular file) of the folder and of its blobs folder.
    """
    for name, regular in top:
        if name != BLOBS and not (regular and (name == MANIFEST or is_temp(name) or _NFS.fullmatch(name))):
            return name
    for name, regular in blobs:
        if not (regular and (is_digest(name) or is_temp(name) or _NFS.fullmatch(name))):
            return f"{BLOBS}/{name}"
    return None


def scan(folder: int, blobs: int | None, shown: str) -> tuple[list[str], list[str]]:
    """The names in a bundle's folder and in its blobs folder (none without one).

    Raises `IntegrityError` for a name, or a kind of file, that does not belong there.
    """
    top = fs.names(folder, MAX_NAMES, shown)
    inside = [] if blobs is None else fs.names(blobs, MAX_NAMES, f"{shown}/{BLOBS}")
    name = stray(top, inside)
    if name is not None:
        raise IntegrityError(
            f"{shown} holds {name!r}, which is not part of a bundle",
            remedy="remove it, or copy the bundle again",
        )
    return [n for n, _ in top], [n for n, _ in inside]
