"""Opening bundles and loading blobs."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gemmcache.bundle import fs, layout, memory
from gemmcache.bundle.interface import Blob
from gemmcache.bundle.reader import BundleReader
from gemmcache.errors import IntegrityError, StorageError, UsageError
from tests.strategies_bundle import bundle, digest_of, published


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    published(tmp_path / "b")
    return tmp_path / "b"


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_what_was_published_is_read(folder: Path) -> None:
    manifest, blobs = bundle()
    with BundleReader.open(str(folder)) as reader:
        assert reader.manifest == manifest
        assert reader.digest == hashlib.sha256((folder / "manifest.msgpack").read_bytes()).hexdigest()
        assert reader.path == folder
        assert {b.digest: reader.read_blob(b) for b in manifest.blobs} == blobs


def test_a_blob_loads_from_a_sealed_memfd(folder: Path) -> None:
    with BundleReader.open(folder) as reader:
        part = reader.manifest.parts[0]
        assert part.blob is not None
        fd = reader.load_blob_memfd(part.blob)
    try:
        wanted = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & wanted == wanted
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        assert not os.get_inheritable(fd)
        library = ctypes.CDLL(f"/proc/self/fd/{fd}")
        assert getattr(library, part.kernels[0].symbol)() == 0
    finally:
        os.close(fd)


@pytest.mark.parametrize("size", [0, 1, fs.CHUNK - 1, fs.CHUNK, fs.CHUNK + 1, 3 * fs.CHUNK + 5])
def test_a_copy_and_its_digest_agree_at_every_size(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data + b"beyond")
    with open(tmp_path / "file", "rb") as file:
        fd = memory.sealed_copy_of_file(file.fileno(), size)
    try:
        assert os.pread(fd, size + 1, 0) == data
        assert digest_of(data) == memory.digest_of(fd, size)
        if hasattr(fcntl, "F_GET_SEALS"):
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"x", 0)
    finally:
        os.close(fd)


@pytest.mark.parametrize("how", ["missing", errno.ENOSYS, errno.EPERM])
def test_a_private_file_serves_where_memfds_do_not(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str | int
) -> None:
    if how == "missing":
        monkeypatch.delattr(os, "memfd_create")
    else:

        def refuse(*_: object) -> int:
            raise OSError(how, "refused")

        monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(tmp_path.iterdir())
    with BundleReader.open(folder) as reader:
        blob = reader.manifest.blobs[0]
        fd = reader.load_blob_memfd(blob)
    try:
        assert set(tmp_path.iterdir()) == before
        assert os.fstat(fd).st_mode & 0o777 == 0o600
        assert os.fstat(fd).st_nlink == 0
        assert os.pread(fd, blob.size + 1, 0) == bundle()[1][blob.digest]
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
    finally:
        os.close(fd)


def test_without_memfd_and_temporary_folder_the_error_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with BundleReader.open(folder) as reader, pytest.raises(StorageError, match="temporary") as caught:
        reader.load_blob_memfd(reader.manifest.blobs[0])
    assert "TMPDIR" in caught.value.remedy


def test_the_bytes_that_are_loaded_are_the_bytes_that_are_hashed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file changes after it was opened and sized: nothing but a refusal may come of it."""
    with BundleReader.open(folder) as reader:
        blob = reader.manifest.blobs[0]
        data = (folder / "blobs" / blob.digest).read_bytes()
        (folder / "blobs" / blob.digest).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        before = open_descriptors()
        with pytest.raises(IntegrityError, match=blob.digest):
            reader.load_blob_memfd(blob)
        with pytest.raises(IntegrityError, match=blob.digest):
            reader.read_blob(blob)
        assert open_descriptors() == before
        # The copy itself is hashed, not what went into it.
        (folder / "blobs" / blob.digest).write_bytes(data)
        honest = memory.sealed_copy
        monkeypatch.setattr(memory, "sealed_copy_of_file", lambda source, size: honest([b"\0" * size], size))
        with pytest.raises(IntegrityError, match=blob.digest):
            reader.load_blob_memfd(blob)
        assert open_descriptors() == before


def test_a_blob_that_grows_is_not_read_beyond_its_size(folder: Path) -> None:
    with BundleReader.open(folder) as reader:
        blob = reader.manifest.blobs[0]
        with open(folder / "blobs" / blob.digest, "ab") as file:
            file.write(b"more")
        assert len(reader.read_blob(blob)) == blob.size


def test_nothing_stays_open(folder: Path) -> None:
    before = open_descriptors()
    reader = BundleReader.open(folder)
    assert len(open_descriptors()) == len(before) + len(reader.manifest.blobs)
    reader.close()
    reader.close()
    assert open_descriptors() == before
    with pytest.raises(UsageError, match="closed"):
        reader.read_blob(reader.manifest.blobs[0])
    reader = BundleReader.open(folder)
    del reader
    assert open_descriptors() == before


def test_a_failed_opening_leaves_nothing_open(folder: Path) -> None:
    os.unlink(folder / "blobs" / bundle()[0].blobs[-1].digest)
    before = open_descriptors()
    with pytest.raises(IntegrityError, match="lacks the blob"):
        BundleReader.open(folder)
    assert open_descriptors() == before


def test_a_blob_of_another_bundle_is_a_usage_error(folder: Path) -> None:
    with BundleReader.open(folder) as reader:
        for blob in (Blob("ab" * 32, 5), Blob(reader.manifest.blobs[0].digest, 5)):
            with pytest.raises(UsageError, match="not of the bundle"):
                reader.read_blob(blob)


def test_what_is_not_a_bundle_is_a_usage_error(tmp_path: Path) -> None:
    for path, text in ((tmp_path, "not a bundle"), (tmp_path / "absent", "does not exist")):
        with pytest.raises(UsageError, match=text):
            BundleReader.open(path)
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "fifo")
    for name in ("file", "fifo"):
        with pytest.raises(UsageError, match="not a folder"):
            BundleReader.open(tmp_path / name)


def test_the_folder_itself_may_be_a_link(folder: Path) -> None:
    (folder.parent / "current").symlink_to(folder)
    with BundleReader.open(folder.parent / "current") as reader:
        assert reader.manifest == bundle()[0]


def test_a_moved_bundle_is_the_same_bundle(folder: Path, tmp_path: Path) -> None:
    with BundleReader.open(folder) as reader:
        digest = reader.digest
    shutil.copytree(folder, tmp_path / "elsewhere/under another name")
    published(tmp_path / "again")
    for path in (tmp_path / "elsewhere/under another name", tmp_path / "again"):
        with BundleReader.open(path) as reader:
            assert reader.digest == digest
            assert reader.read_blob(reader.manifest.blobs[0])


def test_a_new_version_replaces_nothing_that_is_held(folder: Path) -> None:
    with BundleReader.open(folder) as old:
        published(folder, 1)
        with BundleReader.open(folder) as new:
            assert new.digest != old.digest
            for blob in new.manifest.blobs:
                new.read_blob(blob)
        for blob in old.manifest.blobs:
            assert old.read_blob(blob) == bundle()[1][blob.digest]


def test_a_publication_during_the_opening_gives_the_new_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = layout.scan
    times = 0

    def publish_meanwhile(*arguments: object) -> object:
        nonlocal times
        times += 1
        if times <= 3:
            published(folder, times)
        return honest(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(layout, "scan", publish_meanwhile)
    before = open_descriptors()
    with BundleReader.open(folder) as reader:
        assert times == 4
        assert reader.manifest == bundle(3)[0]
        for blob in reader.manifest.blobs:
            assert reader.read_blob(blob) == bundle(3)[1][blob.digest]
    assert open_descriptors() == before


def test_a_bundle_that_never_stands_still_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = layout.scan
    times = 0

    def publish_meanwhile(*arguments: object) -> object:
        nonlocal times
        times += 1
        published(folder, times, real=False)
        return honest(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(layout, "scan", publish_meanwhile)
    with pytest.raises(IntegrityError, match="replaced during each"):
        BundleReader.open(folder)


def test_an_unreadable_file_is_a_storage_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(fs, "open_regular", refuse)
    with pytest.raises(StorageError, match="Permission denied") as caught:
        BundleReader.open(folder)
    assert "permissions" in caught.value.remedy


#: Run as nobody, with a bare environment: opens the bundle at argv[1], loads a blob, prints the digest.
PROGRAM = """
import ctypes, os, sys
from gemmcache.bundle.reader import BundleReader
if os.getuid() == 0:
    # After the imports: the interpreter itself may be private to root.
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
with BundleReader.open(sys.argv[1]) as reader:
    part = reader.manifest.parts[0]
    fd = reader.load_blob_memfd(part.blob)
    getattr(ctypes.CDLL(f"/proc/self/fd/{fd}"), part.kernels[0].symbol)
    print(reader.digest)
"""


def test_another_user_without_home_or_temporary_folder_loads_it(root: Path) -> None:
    """Read-only for everyone, whatever the umask of the writer."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o755)
        old = os.umask(0o077)
        try:
            published(Path(place, "b"))
        finally:
            os.umask(old)
        for path in (Path(place, "b"), Path(place, "b/blobs")):
            path.chmod(0o555)
        try:
            done = subprocess.run(
                [sys.executable, "-B", "-c", PROGRAM, f"{place}/b"],
                env={"PYTHONPATH": str(root), "TMPDIR": "/nonexistent"},
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            for path in (Path(place, "b"), Path(place, "b/blobs")):
                path.chmod(0o755)
        assert done.returncode == 0, done.stderr
        with BundleReader.open(f"{place}/b") as reader:
            assert done.stdout.strip() == reader.digest


def test_a_bundle_loads_from_a_read_only_noexec_mount(root: Path, folder: Path) -> None:
    mount = f"mount --bind {folder} {folder} && mount -o remount,bind,ro,noexec {folder}"
    space = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"]), "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*space, mount], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount")
    check = f"! touch {folder}/x 2>/dev/null && exec {sys.executable} -B -c '{PROGRAM}' {folder}"
    # As root inside: another user can't look into the temporary folders of pytest.
    check = check.replace("if os.getuid() == 0:", "if False:")
    done = subprocess.run(
        [*space, f"{mount} && {check}"],
        env={"PYTHONPATH": str(root), "PATH": os.environ["PATH"], "TMPDIR": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with BundleReader.open(folder) as reader:
        assert done.stdout.strip() == reader.digest


def test_reading_needs_nothing_but_the_base(root: Path, folder: Path) -> None:
    """Everything of the bundle package works where tools of builders and the GPU's libraries do not exist."""
    program = """
import sys
for name in ("torch", "click", "rich", "diskcache", "cutlass", "tvm_ffi", "numpy", "transformers", "yaml"):
    sys.modules[name] = None
from gemmcache.bundle import describe, reader, resources, verify, writer
assert verify.verify(sys.argv[1]).ok
with reader.BundleReader.open(sys.argv[1]) as r:
    writer.publish(sys.argv[1], r.manifest, {b.digest: r.read_blob(b) for b in r.manifest.blobs})
    assert describe.describe(r)["parts"]
"""
    subprocess.run(
        [sys.executable, "-c", program, str(folder)], env={**os.environ, "PYTHONPATH": str(root)}, check=True
    )
