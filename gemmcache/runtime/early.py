"""Work that a load begins before its turn: copying and hashing a blob while the environment is looked at."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from gemmcache.bundle.interface import Blob
from gemmcache.bundle.reader import BundleReader
from gemmcache.runtime.native import is_loaded


class EarlyCopy:
    """A checked copy of a blob, made by a thread. `discard` it at the end, while `reader` is open, taken or not."""

    def __init__(self, reader: BundleReader, blob: Blob) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gemmcache-copy")
        self._copy = self._pool.submit(reader.load_blob_memfd, blob)
        self._taken = False

    def take(self) -> int:
        """The descriptor, which now is the caller's to close. Raises as `BundleReader.load_blob_memfd`."""
        fd = self._copy.result()
        self._taken = True
        return fd

    def discard(self) -> None:
        """Waits for the copy and closes it, if nobody took it."""
        self._pool.shutdown(wait=True)
        if not self._taken and self._copy.exception() is None:
            os.close(self._copy.result())


def begin_copy(reader: BundleReader) -> EarlyCopy | None:
    """Begins copying the blob of the bundle's only part; None if there are several to choose from, or no need."""
    parts = reader.manifest.parts
    blob = parts[0].blob if len(parts) == 1 else None
    return None if blob is None or is_loaded(blob.digest) else EarlyCopy(reader, blob)
