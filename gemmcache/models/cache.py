"""Workloads kept on disk, since building a model to look at it takes seconds. Losing them loses nothing."""

from __future__ import annotations

import contextlib
import os
import tempfile
from functools import cache
from pathlib import Path

from gemmcache import codec
from gemmcache._version import __version__
from gemmcache.errors import GemmcacheError, IntegrityError, UsageError
from gemmcache.models.interface import Workload
from gemmcache.paths import cache_dir

_MAX_ENTRY_BYTES = 16 << 20


@cache
def _sources_digest() -> str:
    """Digest of the modules that make a workload: an edit of them makes another key."""
    folder = Path(__file__).parent
    return codec.digest("model-sources", [[p.name, p.read_bytes()] for p in sorted(folder.glob("*.py"))])


def key_of(config: bytes, options: dict[str, codec.Value], transformers_version: str) -> str:
    """sha256 of everything that a workload depends on."""
    return codec.digest("workload-cache", [config, options, transformers_version, __version__, _sources_digest()])


def _seal(key: str, body: bytes) -> str:
    """Digest over an entry and its key: a flipped bit, or a file under another name, is no hit."""
    return codec.digest("workload-entry", [key, body])


class WorkloadCache:
    """One file per key under `folder` (by default `workloads` in the user's cache directory).

    A damaged entry reads as absent, and a directory that can't be written to keeps nothing; neither is an
    error.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def _path(self, key: str) -> Path | None:
        try:
            return (self._folder or cache_dir() / "workloads") / f"{key}.bin"
        except GemmcacheError:
            return None  # no directory of this user's own at all

    def get(self, key: str) -> Workload | None:
        """The workload stored under `key`, or None."""
        path = self._path(key)
        if path is None:
            return None
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_ENTRY_BYTES + 1)
            value = codec.decode(data, max_bytes=_MAX_ENTRY_BYTES, what=str(path))
            fields = codec.Fields(value, str(path))
            body = fields.raw("workload")
            if not isinstance(body, bytes) or fields.text("digest") != _seal(key, body):
                return None
            return Workload.from_value(codec.decode(body, floats=True, what=str(path)), str(path))
        except (OSError, IntegrityError, UsageError):
            return None

    def put(self, key: str, workload: Workload) -> None:
        """Stores `workload` under `key`, whole or not at all."""
        path = self._path(key)
        if path is None:
            return
        body = codec.encode(workload.to_value(), floats=True)
        data = codec.encode({"digest": _seal(key, body), "workload": body})
        temporary = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except OSError:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
