"""Publishes a bundle: everything is written beside what is there, then one rename makes it the bundle.

Whatever interrupts a publication, the folder holds the old version or the new one, whole; running it again
finishes the work. Writers of one folder wait for each other; readers never wait.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from gemmcache.bundle import fs, layout
from gemmcache.bundle.interface import MAX_MANIFEST_BYTES, MAX_VERSION, Blob, Manifest
from gemmcache.codec import bytes_digest, is_digest
from gemmcache.errors import IncompatibleError, IntegrityError, UsageError

Source = bytes | Path


def publish(
    folder: str | os.PathLike[str],
    manifest: Manifest,
    blobs: Mapping[str, Source],
    *,
    lock_timeout_s: float = 60.0,
    renumber: bool = False,
) -> str:
    """Makes `manifest` and its blobs the bundle in `folder`; the bundle's digest.

    `blobs` maps the digest of every blob that the manifest names, and of no other, to its bytes or to a file.
    With `renumber` the version is the one that `version_for` gives, taken while other writers wait.
    Publishing what is there already changes nothing.

    Raises `UsageError` if `folder` holds anything that is not a bundle (then nothing is touched), or `blobs`
    or the manifest do not fit the format; `IntegrityError` if a blob's bytes do not have its digest;
    `StorageError` if the file system refuses, or another writer holds the folder for longer than
    `lock_timeout_s` seconds. After a `StorageError` the old version is there, or the new one, and whole.
    """
    _check(manifest, blobs)
    # The lock must be the same by whatever path the folder is reached.
    place = Path(os.path.realpath(folder))
    if not place.name:
        raise UsageError(f"{place} can't be a bundle", remedy="name a folder of its own")
    with fs.storage_errors(f"can't publish to {place}"):
        place.parent.mkdir(parents=True, exist_ok=True)
        parent = fs.open_folder(str(place.parent))
        try:
            with fs.locked(parent, f".{place.name}.lock", lock_timeout_s):
                if renumber:
                    manifest = version_for(place, manifest)
                return _publish_locked(parent, place, manifest, blobs)
        finally:
            os.close(parent)


def check_destination(folder: str | os.PathLike[str]) -> None:
    """Refuses a place where `publish` could not publish, before a build has spent its time.

    Raises `UsageError` for a folder with anything else in it, or a path through a file. Touches nothing.
    """
    place = Path(os.path.realpath(folder))
    for path in (place, *place.parents):
        if os.path.lexists(path):
            if not path.is_dir():
                raise UsageError(f"{path} is not a folder", remedy="name another folder")
            break
    if place.is_dir():
        with fs.storage_errors(f"can't read {place}"):
            fd = fs.open_folder(str(place))
            try:
                _must_be_ours(fd, place)
            finally:
                os.close(fd)


def version_for(folder: str | os.PathLike[str], manifest: Manifest) -> Manifest:
    """`manifest` with the version to publish it under: that of the bundle in `folder` if they differ in
    nothing else (so that a rebuild gives the same bytes), otherwise one more; 1 where there is no bundle yet.

    Raises `IntegrityError` or `IncompatibleError` if a bundle is there whose manifest can't be read.
    """
    existing = _existing(folder)
    if existing is None:
        return replace(manifest, version=1)
    if replace(manifest, version=existing.version).encode() == existing.encode():
        return replace(manifest, version=existing.version)
    return replace(manifest, version=_after(existing))


def next_version(folder: str | os.PathLike[str]) -> int:
    """One more than the version of the bundle in `folder`, 1 where there is none. Raises as `version_for`."""
    existing = _existing(folder)
    return 1 if existing is None else _after(existing)


def _after(existing: Manifest) -> int:
    if existing.version >= MAX_VERSION:
        raise UsageError(f"version {existing.version} is the last one", remedy="publish to another folder")
    return existing.version + 1


def _existing(folder: str | os.PathLike[str]) -> Manifest | None:
    """The manifest in `folder`; its blobs are not looked at, so that publishing can repair them."""
    with fs.storage_errors(f"can't read the bundle {folder}"):
        try:
            fd = fs.open_folder(os.fspath(folder))
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise UsageError(f"{folder} is not a folder", remedy="name another folder") from None
        try:
            data = _manifest_bytes(fd, str(folder))
        finally:
            os.close(fd)
    if data is None:
        return None
    try:
        return Manifest.decode(data)
    except IntegrityError as error:
        raise IntegrityError(error.message, remedy=f"remove {folder}, or publish to another folder") from error


def _manifest_bytes(folder: int, shown: str) -> bytes | None:
    """The bytes of the manifest file (one more than allowed if it is too long), None if there is none."""
    try:
        fd = fs.open_regular(folder, layout.MANIFEST, f"{shown}/{layout.MANIFEST}")
    except FileNotFoundError:
        return None
    try:
        return b"".join(fs.chunks(fd, MAX_MANIFEST_BYTES + 1))
    finally:
        os.close(fd)


def _check(manifest: Manifest, blobs: Mapping[str, Source]) -> None:
    """Refuses what no reader would accept, before anything is written."""
    try:
        decoded = Manifest.decode(manifest.encode())
    except IntegrityError as error:
        raise UsageError(f"this can't be published: {error.message}") from error
    if decoded.encode() != manifest.encode():
        raise UsageError("this can't be published: the manifest does not come back as it is")
    wanted = {blob.digest for blob in manifest.blobs}
    if set(blobs) != wanted:
        missing, extra = sorted(wanted - set(blobs)), sorted(set(blobs) - wanted)
        raise UsageError(f"the blobs are not those that the manifest names: missing {missing}, not named {extra}")


def _publish_locked(parent: int, place: Path, manifest: Manifest, blobs: Mapping[str, Source]) -> str:
    fs.make_folder(place.name, parent)
    try:
        folder = fs.open_folder(place.name, parent)
    except NotADirectoryError:
        raise UsageError(f"{place} is not a folder", remedy="name another folder") from None
    try:
        _must_be_ours(folder, place)
        # Also if it was there: a killed publication may have made it, and not come as far as this.
        fs.sync(parent, place.parent.name)
        return _publish_into(folder, place, manifest, blobs)
    finally:
        os.close(folder)


def _must_be_ours(folder: int, place: Path) -> None:
    """Refuses a folder with anything in it that a bundle, or a killed publication of one, would not leave."""
    try:
        top = fs.names(folder, layout.MAX_NAMES, str(place))
        inside: list[tuple[str, bool]] = []
        if (layout.BLOBS, False) in top:
            blobs = fs.open_folder(layout.BLOBS, folder)
            try:
                inside = fs.names(blobs, layout.MAX_NAMES, f"{place}/{layout.BLOBS}")
            finally:
                os.close(blobs)
        found = layout.BLOBS if (layout.BLOBS, True) in top else layout.stray(top, inside)
    except (IntegrityError, NotADirectoryError) as error:
        raise UsageError(f"{place} is neither empty nor a bundle: {error}", remedy="name another folder") from error
    if found is not None:
        raise UsageError(
            f"{place} is neither empty nor a bundle: it holds {found!r}",
            remedy="name another folder, or remove it",
        )


def _publish_into(folder: int, place: Path, manifest: Manifest, blobs: Mapping[str, Source]) -> str:
    data = manifest.encode()
    previous = _manifest_bytes(folder, str(place))
    named = {blob.digest for blob in manifest.blobs}
    fs.make_folder(layout.BLOBS, folder)
    blobs_folder = fs.open_folder(layout.BLOBS, folder)
    try:
        # Under the lock, a file with a temporary name belongs to nobody who is alive.
        _remove(folder, layout.is_temp)
        _remove(blobs_folder, layout.is_temp)
        if previous is not None:
            # What killed publications left, or it would pile up until readers refuse the folder. Without an
            # earlier manifest nothing shows that such files came from here, so they stay.
            kept = named | _named_by(previous)
            _remove(blobs_folder, lambda name: is_digest(name) and name not in kept)
        for blob in manifest.blobs:
            _put_blob(blobs_folder, blob, blobs[blob.digest])
        fs.sync(blobs_folder, layout.BLOBS)
        fs.sync(folder, place.name)
        if previous != data:
            with _new_file(folder, layout.MANIFEST) as fd:
                fs.write(fd, data, layout.MANIFEST)
            fs.sync(folder, place.name)
        if previous is not None:
            _remove(blobs_folder, lambda name: is_digest(name) and name not in named)
    finally:
        os.close(blobs_folder)
    return bytes_digest(data)


def _named_by(data: bytes) -> set[str]:
    """Digests of the blobs that a manifest's bytes name; none if it is damaged, as its bundle is then."""
    try:
        return {blob.digest for blob in Manifest.decode(data).blobs}
    except (IntegrityError, IncompatibleError):
        return set()


def _remove(folder: int, unwanted: Callable[[str], bool]) -> None:
    for name in sorted(filter(unwanted, os.listdir(folder))):
        fs.remove(folder, name)


@contextmanager
def _new_file(folder: int, name: str) -> Iterator[int]:
    """A write descriptor; its bytes become file `name` when the block ends: on the disk, then renamed."""
    temp = fs.temp_name()
    fd = fs.create(folder, temp)
    try:
        try:
            yield fd
            fs.finish(fd, name)
        finally:
            os.close(fd)
        fs.rename(folder, temp, name)
    except BaseException:
        fs.remove(folder, temp)
        raise


def _put_blob(folder: int, blob: Blob, source: Source) -> None:
    """Writes a blob, unless it is there already with the right bytes."""
    if _is_there(folder, blob):
        return
    total, size = hashlib.sha256(), 0
    with _new_file(folder, blob.digest) as fd:
        for piece in _pieces(source, blob.size):
            total.update(piece)
            size += len(piece)
            fs.write(fd, piece, blob.digest)
        if size != blob.size or total.hexdigest() != blob.digest:
            raise IntegrityError(f"the bytes given for blob {blob.digest} do not have that digest and size {blob.size}")


def _pieces(source: Source, size: int) -> Iterator[bytes]:
    """The bytes of a blob, at most one more than there should be."""
    if isinstance(source, bytes):
        yield source[: size + 1]
        return
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield from fs.chunks(fd, size + 1)
    finally:
        os.close(fd)


def _is_there(folder: int, blob: Blob) -> bool:
    with suppress(FileNotFoundError):
        fd = fs.open_regular(folder, blob.digest, blob.digest)
        try:
            if os.fstat(fd).st_size != blob.size:
                return False
            total = hashlib.sha256()
            for piece in fs.chunks(fd, blob.size):
                total.update(piece)
            return total.hexdigest() == blob.digest
        finally:
            os.close(fd)
    return False
