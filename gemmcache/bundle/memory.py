"""Private copies of bytes that can be loaded as libraries and that nobody else can change."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import tempfile
from collections.abc import Iterable

from gemmcache.bundle import fs
from gemmcache.errors import StorageError

#: Not in the `os` module of every supported Python. A library can be loaded all the same: the loader maps it
#: and does not ask for the permission to execute.
_MFD_NOEXEC_SEAL = 0x8
_SEALS = ("F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE")


def _memfd() -> int | None:
    """An empty memfd that can be sealed; None where the system has none, or forbids them."""
    create = getattr(os, "memfd_create", None)
    if create is None:
        return None
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    for extra in (_MFD_NOEXEC_SEAL, 0):
        try:
            return int(create("gemmcache", flags | extra))
        except OSError as error:
            if error.errno == errno.EINVAL and extra:
                continue  # a kernel before 6.3 does not know the flag
            if error.errno in (errno.ENOSYS, errno.EPERM, errno.EACCES):
                return None
            raise
    return None


def sealed_copy(pieces: Iterable[bytes], size: int) -> int:
    """A read descriptor of a copy of `pieces`, of `size` bytes in all; fewer if the pieces are.

    The copy is a sealed memfd, or an unlinked file of mode 0600 in the temporary folder where memfd_create is
    missing. Raises `OSError`, or `StorageError` if neither can be had.
    """
    fd = _memfd()
    if fd is None:
        return _unlinked_copy(pieces)
    try:
        _fill(fd, pieces)
        _seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def sealed_copy_of_file(source: int, size: int) -> int:
    """`sealed_copy` of the first `size` bytes of the file behind `source`, copied by the kernel where it can."""
    fd = _memfd()
    if fd is None:
        return _unlinked_copy(fs.chunks(source, size))
    try:
        offset = 0
        while offset < size:
            moved = os.sendfile(fd, source, offset, size - offset)
            if not moved:
                break
            offset += moved
        _seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _seal(fd: int) -> None:
    seals = 0
    for name in _SEALS:
        seals |= int(getattr(fcntl, name))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def _fill(fd: int, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        fs.write(fd, piece, "memory")


def _unlinked_copy(pieces: Iterable[bytes]) -> int:
    try:
        fd, name = tempfile.mkstemp(prefix="gemmcache-")
    except OSError as error:
        raise StorageError(
            f"no memfd_create here, and no temporary file can be made: {error.strerror}",
            remedy="set TMPDIR to a folder that can be written to",
        ) from error
    try:
        try:
            _fill(fd, pieces)
            # A second descriptor, so that what is handed out can't be written through.
            return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        finally:
            os.unlink(name)
    finally:
        os.close(fd)


def digest_of(fd: int, size: int) -> str:
    """sha256, as 64 hex digits, of the first `size` bytes behind `fd`; of one more if there are more."""
    length = min(os.fstat(fd).st_size, size + 1)
    if not length:
        return hashlib.sha256().hexdigest()
    with mmap.mmap(fd, length, prot=mmap.PROT_READ) as view:
        return hashlib.sha256(view).hexdigest()
