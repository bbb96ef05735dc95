"""The object cache: compiled kernels by digest, checked on every read."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

from gemmcache.codec import is_digest
from gemmcache.errors import UsageError

_HASH_BYTES = 32


class ObjectCache:
    """A folder of `<kernel digest>.o` files, each a sha256 over kernel digest and object, then the object.

    A damaged entry is a miss, and so is one under another kernel's name. Many processes may share the folder:
    entries are written beside and renamed. A folder that can't be written only costs the compilation next time.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, digest: str) -> Path:
        if not is_digest(digest):
            raise UsageError(f"'{digest}' is not a kernel digest")
        return self.folder / f"{digest}.o"

    def get(self, digest: str) -> bytes | None:
        """The object of that digest, None if it is absent or damaged."""
        path = self._path(digest)
        try:
            # Reading a FIFO would wait for ever.
            data = path.read_bytes() if path.is_file() else b""
        except OSError:
            return None
        body = data[_HASH_BYTES:]
        return body if body and _check(digest, body) == data[:_HASH_BYTES] else None

    def put(self, digest: str, data: bytes) -> None:
        """Stores an object; quietly does nothing where the folder refuses."""
        path = self._path(digest)
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            fd, temporary = tempfile.mkstemp(prefix=".new-", dir=self.folder)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(_check(digest, data) + data)
                os.replace(temporary, path)
            except OSError:
                os.unlink(temporary)
                raise


def _check(digest: str, data: bytes) -> bytes:
    return hashlib.sha256(digest.encode() + data).digest()
