"""Private copies of bytes that can be loaded as libraries and that nobody else can change."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from gemmcache.bundle import fs
from gemmcache.errors import StorageError

#: Not in the `os` module of every supported Python. A library can be loaded all the same: the loader maps it
#: and does not ask for the permission to execute.
_MFD_NOEXEC_SEAL = 0x8
#: Threads that hash one file at most: each costs its start.
_HASHERS = 4
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


def hashed_copy_of_file(source: int, size: int, piece: int | None = None) -> tuple[int, tuple[str, ...]]:
    """`sealed_copy` of the first `size` bytes of the file behind `source`, and the sha256 of each `piece` bytes of the
    copy (of all of them at once if not given) as 64 hex digits.

    What has been copied is hashed while the kernel copies the rest, pieces beside each other. A file that is shorter
    counts as ending in zeros.
    """
    fd = _memfd()
    copied: Iterable[int]
    if fd is None:
        fd, copied = _unlinked_copy(fs.chunks(source, size)), (size,)
        seal = False
    else:
        copied, seal = _copying(source, fd, size), True
    try:
        if seal:
            os.ftruncate(fd, size)
        digests = _hashed(fd, size, copied, piece)
        if seal:
            _seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd, digests


def _copying(source: int, fd: int, size: int) -> Iterator[int]:
    """Copies to a memfd, and tells how much is there. What the file lacks was zero before."""
    offset = 0
    while offset < size:
        moved = os.sendfile(fd, source, offset, min(fs.CHUNK, size - offset))
        if not moved:
            break
        offset += moved
        yield offset
    if offset < size:
        yield size


def _hashed(fd: int, size: int, copied: Iterable[int], piece: int | None) -> tuple[str, ...]:
    """sha256 of the pieces of `fd`, or of all of it, by threads as soon as `copied` says that they are there."""
    if not size:
        return (hashlib.sha256().hexdigest(),)
    pieces = -(-size // piece) if piece else 1
    totals = [hashlib.sha256() for _ in range(pieces)]
    # All of it is hashed by one thread, in the order in which it comes.
    workers = min(pieces, os.cpu_count() or 1, _HASHERS)
    # A private mapping: a shared one, even for reading, would keep a memfd from being sealed.
    with (
        mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as view,
        memoryview(view) as content,
        ThreadPoolExecutor(workers, thread_name_prefix="gemmcache-hash") as pool,
    ):

        def update(index: int, start: int, end: int) -> None:
            with content[start:end] as part:
                totals[index].update(part)

        begun = []
        done = 0
        for there in copied:
            if piece is None:
                begun.append(pool.submit(update, 0, done, there))
                done = there
                continue
            while done < size and (there == size or done + piece <= there):
                begun.append(pool.submit(update, done // piece, done, min(done + piece, size)))
                done += piece
        for future in begun:
            future.result()
    return tuple(total.hexdigest() for total in totals)


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
