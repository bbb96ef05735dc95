"""The file system calls of bundles, all through descriptors of folders, so that no name is followed twice.

Names are single path components relative to an open folder; links are never followed. Functions raise the
plain `OSError`; `storage_errors` turns what leaves this package into `StorageError`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gemmcache.errors import GemmcacheError, IntegrityError, StorageError

#: Bytes a read or a write moves at once.
CHUNK = 1 << 20

#: Called before each call that changes something, with its name and its object. Fault tests set it to raise
#: `OSError` or to end the process; nothing else does.
before: Callable[[str, str], None] | None = None

_REMEDIES = {
    errno.ENOSPC: "free some space, then run it again",
    errno.EDQUOT: "free some of the quota, then run it again",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "choose a folder on a writable file system",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def _change(call: str, name: str) -> None:
    if before is not None:
        before(call, name)


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turns an `OSError` inside the block into a `StorageError` that starts with `what`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, GemmcacheError):
            raise
        remedy = _REMEDIES.get(error.errno or 0, "")
        raise StorageError(f"{what}: {error.strerror or error}", remedy=remedy) from error


def open_folder(name: str, folder: int | None = None) -> int:
    """A descriptor of folder `name`, inside `folder` if given (then a link is refused with `OSError`)."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    return os.open(name, flags if folder is None else flags | os.O_NOFOLLOW, dir_fd=folder)


def open_regular(folder: int, name: str, shown: str) -> int:
    """A read descriptor of the regular file `name`. Raises `IntegrityError` if it is anything else.

    Never blocks, and never opens a device: opening alone can have effects there.
    """
    _must_be_regular(os.stat(name, dir_fd=folder, follow_symlinks=False), shown)
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise IntegrityError(f"{shown} is a symbolic link, not a regular file") from error
        raise
    try:
        _must_be_regular(os.fstat(fd), shown)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _must_be_regular(status: os.stat_result, shown: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = {stat.S_IFLNK: "symbolic link", stat.S_IFDIR: "folder", stat.S_IFIFO: "FIFO"}
        found = kind.get(stat.S_IFMT(status.st_mode), "special file")
        raise IntegrityError(f"{shown} is a {found}, not a regular file")


def names(folder: int, most: int, shown: str) -> list[tuple[str, bool]]:
    """(name, whether it is a regular file) of everything in `folder`, sorted.

    Raises `IntegrityError` at more than `most` names; what vanishes meanwhile is left out.
    """
    found: list[tuple[str, bool]] = []
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            if count >= most:
                raise IntegrityError(f"{shown} holds more than {most} files")
            regular = entry.is_file(follow_symlinks=False)
            if not regular and not exists(folder, entry.name):
                continue
            found.append((entry.name, regular))
    return sorted(found)


def exists(folder: int, name: str) -> bool:
    """Whether `folder` has an entry `name`, of whatever kind."""
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def same_file(fd: int, folder: int, name: str) -> bool:
    """Whether `name` is still the file behind `fd`. While `fd` is open, its inode can't be reused."""
    try:
        now = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    held = os.fstat(fd)
    return (now.st_dev, now.st_ino) == (held.st_dev, held.st_ino)


def chunks(fd: int, size: int) -> Iterator[bytes]:
    """The first `size` bytes of the file behind `fd`, in pieces; fewer if the file is shorter."""
    offset = 0
    while offset < size:
        piece = os.pread(fd, min(CHUNK, size - offset), offset)
        if not piece:
            return
        offset += len(piece)
        yield piece


def make_folder(name: str, folder: int) -> bool:
    """Creates folder `name`, readable by everyone; False if the name is taken."""
    _change("mkdir", name)
    try:
        os.mkdir(name, 0o755, dir_fd=folder)
    except FileExistsError:
        return False
    # The umask must not keep other users from reading a bundle.
    os.chmod(name, 0o755, dir_fd=folder)
    return True


def create(folder: int, name: str) -> int:
    """A write descriptor of a new file. Raises `FileExistsError` if the name is taken."""
    _change("create", name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, 0o600, dir_fd=folder)


def write(fd: int, data: bytes | memoryview, name: str) -> None:
    """Writes all of `data`, in pieces."""
    view = memoryview(data)
    while view:
        _change("write", name)
        view = view[os.write(fd, view[:CHUNK]) :]


def finish(fd: int, name: str) -> None:
    """Makes a written file readable by everyone and puts it on the disk."""
    _change("chmod", name)
    os.fchmod(fd, 0o644)
    sync(fd, name)


def sync(fd: int, name: str) -> None:
    """fsync of a file or folder."""
    _change("fsync", name)
    os.fsync(fd)


def rename(folder: int, old: str, new: str) -> None:
    """Renames within `folder`, replacing `new` in one step."""
    _change("rename", new)
    os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)


def remove(folder: int, name: str) -> None:
    """Removes a file. Best effort: what can't be removed is only garbage, and is reported by `verify`."""
    try:
        _change("unlink", name)
        os.unlink(name, dir_fd=folder)
    except OSError:
        return


def temp_name() -> str:
    """A name for a file that is being written; `layout.is_temp` tells it from the others."""
    return f".tmp-{secrets.token_hex(8)}"


@contextmanager
def locked(folder: int, name: str, timeout_s: float) -> Iterator[None]:
    """Holds an exclusive flock on file `name` of `folder`, which is created and stays.

    Raises `StorageError` if another process holds it for longer than `timeout_s` seconds. The lock ends with
    the process, however that ends.
    """
    _change("lock", name)
    flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags, 0o644, dir_fd=folder)
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StorageError(
                        f"another process has held the lock '{name}' for {timeout_s:g} s",
                        remedy="wait for the other build to end, then run it again",
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)
