"""Private copies of bytes that can be loaded as libraries and that nobody else can change."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import queue
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from gemmcache.bundle import fs
from gemmcache.errors import StorageError

#: Not in the `os` module of every supported Python. A library can be loaded all the same: the loader maps it
#: and does not ask for the permission to execute.
_MFD_NOEXEC_SEAL = 0x8
#: Threads that hash one file at most: more than this many outrun memory.
_HASHERS = 8
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
    ends = list(range(piece, size, piece)) if piece else []
    ends.append(size)
    fd = _memfd()
    if fd is None:
        fd = _unlinked_copy(fs.chunks(source, size))
        try:
            return fd, _hashed(fd, size, ends, lambda: None)
        except BaseException:
            os.close(fd)
            raise
    try:
        os.ftruncate(fd, size)
        copying = _Copying(source, fd, size)
        digests = _hashed(fd, size, ends, copying.next)
        _seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd, digests


class _Copying:
    """Copies a file to a memfd, some of it at each call of `next`."""

    def __init__(self, source: int, fd: int, size: int) -> None:
        self.source, self.fd, self.size, self.offset = source, fd, size, 0

    def next(self) -> int | None:
        """How much has been copied; None at the end of the file or of what is wanted."""
        if self.offset == self.size:
            return None
        moved = os.sendfile(self.fd, self.source, self.offset, min(fs.CHUNK, self.size - self.offset))
        self.offset += moved
        return self.offset if moved else None


def _hashed(fd: int, size: int, ends: Sequence[int], more: Callable[[], int | None]) -> tuple[str, ...]:
    """sha256 of the stretches of `fd` that end at `ends`, each by a thread as soon as `more` says it is there."""
    if not size:
        return (hashlib.sha256().hexdigest(),)
    starts = (0, *ends[:-1])
    workers = max(1, min(len(ends), os.cpu_count() or 1, _HASHERS))
    # A private mapping: a shared one, even for reading, would keep a memfd from being sealed.
    with (
        mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as view,
        memoryview(view) as content,
        ThreadPoolExecutor(workers, thread_name_prefix="gemmcache-hash") as pool,
    ):
        waiting = [_Stretch(content, start, end) for start, end in zip(starts, ends, strict=True)]
        begun: list[Future[str]] = []
        try:
            while (there := more()) is not None:
                while len(begun) < len(waiting) and waiting[len(begun)].start < there:
                    begun.append(pool.submit(waiting[len(begun)].digest))
                for stretch in waiting:
                    stretch.there.put(there)
        finally:
            for stretch in waiting:
                stretch.there.put(size)
        begun += [pool.submit(stretch.digest) for stretch in waiting[len(begun) :]]
        return tuple(future.result() for future in begun)


class _Stretch:
    """Bytes that are hashed as they come."""

    def __init__(self, content: memoryview, start: int, end: int) -> None:
        self.content, self.start, self.end = content, start, end
        self.there: queue.SimpleQueue[int] = queue.SimpleQueue()

    def digest(self) -> str:
        total = hashlib.sha256()
        done = self.start
        while done < self.end:
            there = min(self.there.get(), self.end)
            if there > done:
                with self.content[done:there] as piece:
                    total.update(piece)
                done = there
        return total.hexdigest()


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
