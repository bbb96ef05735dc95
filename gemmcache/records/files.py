"""Whole files, or none: written beside, synced, renamed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gemmcache.errors import StorageError


def write_atomically(path: Path, chunks: Iterable[bytes]) -> int:
    """Writes `chunks` to `path`: a reader or a crash finds the old file or the new one. Returns its bytes.

    Raises `StorageError` if the file system refuses; the old file is whole then, no temporary one is left.
    """
    size = 0
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                for chunk in chunks:
                    size += file.write(chunk)
                file.flush()
                # mkstemp's 0600 is for secrets; this is a file to pass on.
                os.fchmod(file.fileno(), 0o644)
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{path} can't be written: {error}", remedy="check the folder and its free space") from error
    return size
