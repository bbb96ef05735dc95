"""Checks every byte of a bundle: digests, sizes, and that each kernel's function is in its blob."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from gemmcache.bundle import elf, fs, layout, memory
from gemmcache.bundle.interface import MAX_BLOB_BYTES, Blob, Part
from gemmcache.bundle.reader import BundleReader
from gemmcache.codec import is_digest
from gemmcache.errors import IntegrityError
from gemmcache.kernels.identity import kernel_digest


@dataclass(frozen=True, slots=True)
class Checked:
    """A blob that was read: the digest in its name, its size in bytes, and how many kernels are in it."""

    digest: str
    size: int
    kernels: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found. The bundle is good if there are no `problems`.

    `orphans` are blobs that the manifest does not name, and `leftovers` files of publications that were
    killed or are under way: the next publication removes both, and they do no harm.
    """

    path: str
    digest: str | None
    name: str | None
    version: int | None
    blobs: tuple[Checked, ...]
    orphans: tuple[Checked, ...]
    leftovers: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_value(self) -> dict[str, object]:
        return {**asdict(self), "ok": self.ok}


def verify(path: str | os.PathLike[str]) -> Report:
    """Reads all of the bundle in folder `path`. What is wrong with it is in the report, not raised.

    Raises `UsageError` if no bundle is there, `IncompatibleError` for another major format, `StorageError`
    if the file system refuses.
    """
    try:
        reader = BundleReader.open(path)
    except IntegrityError as error:
        return Report(str(path), None, None, None, (), (), (), (error.message,))
    with reader:
        problems: list[str] = []
        blobs = []
        for blob in reader.manifest.blobs:
            parts = [p for p in reader.manifest.parts if p.blob == blob]
            try:
                with _mapped(reader, blob) as data:
                    problems += [f"blob {blob.digest}: {p}" for part in parts for p in _wrong_in(data, part)]
            except IntegrityError as error:
                problems.append(error.message)
            blobs.append(Checked(blob.digest, blob.size, sum(len(p.kernels) for p in parts)))
        for part in reader.manifest.parts:
            problems += [
                f"kernel {kernel.digest}: its digest is not that of its spec, toolchain and host"
                for kernel in part.kernels
                if kernel.digest != kernel_digest(kernel.spec, part.toolchain, part.host)
            ]
        orphans, leftovers, strange = _unnamed(reader)
        return Report(
            path=str(path),
            digest=reader.digest,
            name=reader.manifest.name,
            version=reader.manifest.version,
            blobs=tuple(blobs),
            orphans=tuple(orphans),
            leftovers=tuple(leftovers),
            problems=(*problems, *strange),
        )


@contextmanager
def _mapped(reader: BundleReader, blob: Blob) -> Iterator[mmap.mmap]:
    """The checked bytes of a blob, mapped rather than read: blobs may be large."""
    fd = reader.load_blob_memfd(blob)
    try:
        with mmap.mmap(fd, blob.size, access=mmap.ACCESS_READ) as data:
            yield data
    finally:
        os.close(fd)


def _wrong_in(data: mmap.mmap, part: Part) -> Iterator[str]:
    """What keeps the kernels of `part` from being found in its blob."""
    try:
        machine = elf.header(data).machine
        exported = elf.exports(data)
    except IntegrityError as error:
        yield error.message
        return
    expected = elf.MACHINES.get(part.host.arch)
    if expected is not None and machine != expected:
        yield f"it is for the ELF machine {machine}, not for {part.host.arch} ({expected})"
    for kernel in part.kernels:
        if kernel.symbol not in exported:
            yield f"it does not export {kernel.symbol}"


def _unnamed(reader: BundleReader) -> tuple[list[Checked], list[str], list[str]]:
    """Orphans, leftovers, and what is wrong with orphans, of the folder as it is now."""
    named = {blob.digest for blob in reader.manifest.blobs}
    orphans: list[Checked] = []
    leftovers: list[str] = []
    strange: list[str] = []
    with fs.storage_errors(f"can't list the bundle {reader.path}"):
        folder = fs.open_folder(str(reader.path))
        try:
            leftovers += filter(layout.is_temp, os.listdir(folder))
            if not fs.exists(folder, layout.BLOBS):
                return orphans, leftovers, strange
            blobs = fs.open_folder(layout.BLOBS, folder)
            try:
                for name in sorted(os.listdir(blobs)):
                    if layout.is_temp(name):
                        leftovers.append(f"{layout.BLOBS}/{name}")
                    elif is_digest(name) and name not in named:
                        orphan, problem = _orphan(blobs, name, reader.path)
                        orphans += orphan
                        strange += problem
            finally:
                os.close(blobs)
        finally:
            os.close(folder)
    return orphans, leftovers, strange


def _orphan(folder: int, name: str, path: Path) -> tuple[list[Checked], list[str]]:
    """An orphan and what is wrong with it; neither if a publication has removed it meanwhile."""
    shown = f"{path}/{layout.BLOBS}/{name}"
    try:
        fd = fs.open_regular(folder, name, shown)
    except FileNotFoundError:
        return [], []
    except IntegrityError as error:
        return [], [error.message]
    try:
        size = os.fstat(fd).st_size
        if size > MAX_BLOB_BYTES:
            return [Checked(name, size)], [f"{shown}, which nothing names, has {size} bytes"]
        if memory.digest_of(fd, size) != name:
            return [Checked(name, size)], [f"{shown}, which nothing names, does not have that digest"]
        return [Checked(name, size)], []
    finally:
        os.close(fd)
