"""Reads a bundle: one consistent version, its bytes checked before anyone gets them.

Everything is opened at once, so that what a reader holds stays readable whatever is published meanwhile.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from gemmcache import codec
from gemmcache.bundle import fs, layout, memory
from gemmcache.bundle.interface import MAX_MANIFEST_BYTES, Blob, Manifest, hinted_cuda_major
from gemmcache.errors import IntegrityError, UsageError

#: Openings before a folder is given up whose manifest is replaced during each of them.
TRIES = 32


class _Replaced(Exception):
    """A new version was published between reading the manifest and opening its blobs."""


class BundleReader:
    """An open bundle. Use as a context manager, or `close` it; descriptors also close with the object.

    `manifest` is the decoded table of contents, `digest` the sha256 of its bytes, `path` the folder as given.
    """

    def __init__(self, path: Path, data: bytes, manifest: Manifest, blobs: Mapping[str, int]) -> None:
        self.path = path
        self.manifest = manifest
        self.manifest_bytes = len(data)
        self.digest = codec.bytes_digest(data)
        self._blobs = dict(blobs)
        self._close = weakref.finalize(self, _close_all, tuple(blobs.values()))

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, early: Callable[[int | None], None] | None = None) -> BundleReader:
        """Opens the bundle in folder `path` and holds its blobs open, without reading them.

        `early` is called before the manifest is decoded, with the CUDA major that it seems to ask for: a hint.
        Raises `UsageError` if no bundle is there, `IntegrityError` for a damaged manifest, a missing blob,
        one of another size, or anything in the folder that does not belong there, `IncompatibleError` for
        another major format, and `StorageError` if the file system refuses.
        """
        folder_path = Path(path)
        with fs.storage_errors(f"can't open the bundle {folder_path}"):
            for _ in range(TRIES):
                folder = _open_bundle_folder(folder_path)
                try:
                    return cls._open_once(folder_path, folder, early)
                except _Replaced:
                    continue
                finally:
                    os.close(folder)
        raise IntegrityError(
            f"the bundle {folder_path} was replaced during each of {TRIES} openings",
            remedy="publish less often, or copy the bundle for its readers",
        )

    @classmethod
    def _open_once(cls, path: Path, folder: int, early: Callable[[int | None], None] | None) -> BundleReader:
        shown = str(path / layout.MANIFEST)
        try:
            manifest_fd = fs.open_regular(folder, layout.MANIFEST, shown)
        except FileNotFoundError:
            raise UsageError(
                f"{path} is not a bundle: it holds no {layout.MANIFEST}",
                remedy="name a folder that build wrote",
            ) from None
        try:
            data = _read_whole(manifest_fd, shown)
            if early is not None:
                early(hinted_cuda_major(data))
            manifest = Manifest.decode(data)
            blobs_folder = _open_blobs_folder(folder, path, needed=bool(manifest.blobs))
            held: dict[str, int] = {}
            try:
                layout.scan(folder, blobs_folder, str(path))
                if blobs_folder is not None:
                    for blob in manifest.blobs:
                        held[blob.digest] = _open_blob(blobs_folder, blob, path)
            except FileNotFoundError as error:
                _close_all(tuple(held.values()))
                # Only a publication removes blobs, and only after it has replaced the manifest.
                if not fs.same_file(manifest_fd, folder, layout.MANIFEST):
                    raise _Replaced from None
                raise IntegrityError(
                    f"{path} lacks the blob {error.filename}",
                    remedy="copy the bundle again, or build it again",
                ) from None
            except BaseException:
                _close_all(tuple(held.values()))
                raise
            finally:
                if blobs_folder is not None:
                    os.close(blobs_folder)
            return cls(path, data, manifest, held)
        finally:
            os.close(manifest_fd)

    def read_blob(self, blob: Blob) -> bytes:
        """The bytes of `blob`, at most `blob.size` of them in memory.

        Raises `IntegrityError` if they are not what the manifest says, `UsageError` for a blob that is not of
        this bundle, `StorageError` if the file system refuses.
        """
        total = hashlib.sha256()
        data = bytearray()
        with fs.storage_errors(f"can't read blob {blob.digest} of {self.path}"):
            for piece in fs.chunks(self._descriptor(blob), blob.size):
                total.update(piece)
                data += piece
        if total.hexdigest() != blob.digest:
            raise _damaged(self.path, blob)
        return bytes(data)

    def load_blob_memfd(self, blob: Blob) -> int:
        """A descriptor of a private, sealed copy of `blob`, checked after sealing; the caller closes it.

        Load it by the path `/proc/self/fd/<descriptor>`: no other user can swap it, and no file system has to
        allow execution. Keep the descriptor open for as long as the library is loaded: the dynamic loader
        knows libraries by path, and would take the next one that gets the same number for this one.

        Raises as `read_blob`; then nothing stays open.
        """
        with fs.storage_errors(f"can't copy blob {blob.digest} of {self.path}"):
            fd = memory.sealed_copy_of_file(self._descriptor(blob), blob.size)
            try:
                if memory.digest_of(fd, blob.size) != blob.digest:
                    raise _damaged(self.path, blob)
            except BaseException:
                os.close(fd)
                raise
        return fd

    def _descriptor(self, blob: Blob) -> int:
        if not self._close.alive:
            raise UsageError(f"the bundle {self.path} is closed")
        if blob not in self.manifest.blobs:
            raise UsageError(f"blob {blob.digest} is not of the bundle {self.path}")
        return self._blobs[blob.digest]

    def close(self) -> None:
        """Closes the blobs; copies that were handed out stay open."""
        self._close()

    def __enter__(self) -> BundleReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _damaged(path: Path, blob: Blob) -> IntegrityError:
    return IntegrityError(
        f"blob {blob.digest} of {path} does not have the bytes that its name stands for",
        remedy="copy the bundle again, or build it again",
    )


def _close_all(descriptors: tuple[int, ...]) -> None:
    for fd in descriptors:
        os.close(fd)


def _open_bundle_folder(path: Path) -> int:
    try:
        return fs.open_folder(str(path))
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist", remedy="name a folder that build wrote") from None
    except NotADirectoryError:
        raise UsageError(f"{path} is not a folder", remedy="name a folder that build wrote") from None


def _open_blobs_folder(folder: int, path: Path, *, needed: bool) -> int | None:
    """The blobs folder; None if it is absent, and not `needed` (archives drop empty folders)."""
    shown = f"{path}/{layout.BLOBS}"
    if not fs.exists(folder, layout.BLOBS):
        if not needed:
            return None
        raise IntegrityError(f"{shown} is missing", remedy="copy the bundle again, or build it again")
    try:
        return fs.open_folder(layout.BLOBS, folder)
    except NotADirectoryError:
        # Also what a symbolic link gives, followed or not.
        raise IntegrityError(f"{shown} is not a folder") from None


def _open_blob(folder: int, blob: Blob, path: Path) -> int:
    """A descriptor of a blob of the right size. `FileNotFoundError` passes through, naming the blob."""
    shown = f"{path}/{layout.BLOBS}/{blob.digest}"
    fd = fs.open_regular(folder, blob.digest, shown)
    size = os.fstat(fd).st_size
    if size != blob.size:
        os.close(fd)
        raise IntegrityError(
            f"{shown} has {size} bytes, the manifest says {blob.size}",
            remedy="copy the bundle again, or build it again",
        )
    return fd


def _read_whole(fd: int, shown: str) -> bytes:
    """A manifest's bytes, whose number is checked before anything is read."""
    size = os.fstat(fd).st_size
    if size > MAX_MANIFEST_BYTES:
        raise IntegrityError(f"{shown} has {size} bytes, more than the {MAX_MANIFEST_BYTES} allowed")
    data = b"".join(fs.chunks(fd, size))
    if len(data) != size:
        raise IntegrityError(f"{shown} shrank while it was read")
    return data
