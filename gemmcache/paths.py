"""Where gemmcache keeps files of its own for a user: a cache that may be deleted at any time, and records.

Nothing that serves a bundle needs these; a process without HOME gets a private temporary directory.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from gemmcache.errors import StorageError

APP = "gemmcache"


def cache_dir() -> Path:
    """`$GEMMCACHE_CACHE_DIR`, else `$XDG_CACHE_HOME/gemmcache`, else `~/.cache/gemmcache`; not created here.

    Without a usable HOME: `cache` in a private temporary directory. Raises `StorageError` without any.
    """
    return _own("GEMMCACHE_CACHE_DIR") or _user_dir("XDG_CACHE_HOME", ".cache", "cache")


def data_dir() -> Path:
    """`$XDG_DATA_HOME/gemmcache`, else `~/.local/share/gemmcache`; not created here.

    Without a usable HOME: `data` in a private temporary directory. Raises `StorageError` without any.
    """
    return _user_dir("XDG_DATA_HOME", ".local/share", "data")


def records_dir() -> Path:
    """The user's records: `$GEMMCACHE_RECORDS_DIR`, else `records` in `data_dir()`; not created here."""
    return _own("GEMMCACHE_RECORDS_DIR") or data_dir() / "records"


def _own(variable: str) -> Path | None:
    """What our own variable says, relative paths from the current directory; None where unset or empty."""
    value = os.environ.get(variable, "")
    return Path(value).expanduser().absolute() if value else None


def _user_dir(xdg: str, under_home: str, temporary: str) -> Path:
    base = os.environ.get(xdg, "")
    # The XDG specification says that relative paths in its variables are to be ignored.
    if os.path.isabs(base):
        return Path(base) / APP
    home = os.environ.get("HOME", "")
    if os.path.isabs(home) and os.path.isdir(home):
        path = Path(home) / under_home / APP
        if _usable(path):
            return path
    return _private_temporary() / temporary


def _usable(path: Path) -> bool:
    """Whether `path` is there, or could be made under its nearest existing ancestor."""
    if path.is_dir():
        return True
    for parent in path.parents:
        if os.path.lexists(parent):
            return parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)
    return False


def _private_temporary() -> Path:
    """A directory that only this user can write to: one name a user, or a fresh one if that is taken."""
    try:
        path = Path(tempfile.gettempdir()) / f"{APP}-{os.getuid()}"
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            # Anyone can plant a directory or link of this name in a shared temporary directory.
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
                path = Path(tempfile.mkdtemp(prefix=f"{APP}-"))
    except OSError as error:
        raise StorageError(
            f"no directory of this user's own: no usable HOME, and no temporary directory ({error})",
            remedy="set GEMMCACHE_CACHE_DIR and GEMMCACHE_RECORDS_DIR to writable directories",
        ) from error
    return path
