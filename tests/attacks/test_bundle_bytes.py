"""Damaged and forged bundles: a typed refusal, within bounds of time and memory, and nothing loaded."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmcache.bundle.interface import MAX_MANIFEST_BYTES, Manifest
from gemmcache.bundle.reader import BundleReader
from gemmcache.bundle.verify import verify
from gemmcache.errors import IncompatibleError, IntegrityError, UsageError
from tests.strategies_bundle import bundle, published

MANIFEST = bundle(real=False)[0].encode()


@pytest.fixture(autouse=True)
def _never_hangs() -> Iterator[None]:
    """A reader that waits for a FIFO's writer waits for ever."""

    def stop(*_: object) -> None:
        raise TimeoutError("it hangs")

    old = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    published(tmp_path / "b")
    return tmp_path / "b"


def use(folder: Path) -> None:
    """Opens the bundle and loads everything in it."""
    with BundleReader.open(folder) as reader:
        for blob in reader.manifest.blobs:
            os.close(reader.load_blob_memfd(blob))


def refused(folder: Path, text: str | None = None) -> None:
    with pytest.raises(IntegrityError, match=text):
        use(folder)
    assert not verify(folder).ok


def test_a_manifest_truncated_anywhere_is_refused() -> None:
    for length in range(len(MANIFEST)):
        with pytest.raises(IntegrityError):
            Manifest.decode(MANIFEST[:length])


def test_a_truncated_manifest_file_is_refused(folder: Path) -> None:
    data = (folder / "manifest.msgpack").read_bytes()
    for length in (0, 1, len(data) // 2, len(data) - 1):
        (folder / "manifest.msgpack").write_bytes(data[:length])
        refused(folder)


def test_a_flipped_byte_is_refused_or_only_changes_what_it_says() -> None:
    """Text and numbers may become others (the digest tells); nothing is misread, and no other error is raised."""
    draw = random.Random(0)
    refusals = 0
    for _ in range(1500):
        data = bytearray(MANIFEST)
        data[draw.randrange(len(data))] ^= draw.randrange(1, 256)
        try:
            manifest = Manifest.decode(bytes(data))
        except (IntegrityError, IncompatibleError):
            refusals += 1
            continue
        changed = manifest.to_value() | {"minor": msgpack.unpackb(data)["minor"]}
        assert packed(changed) == data
    assert refusals > 1000


@given(st.binary(max_size=300))
def test_any_bytes_are_a_manifest_or_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        Manifest.decode(data)


@given(st.data())
def test_spliced_manifests_are_read_or_refused(data: st.DataObject) -> None:
    places = st.integers(0, len(MANIFEST))
    a, b = sorted((data.draw(places), data.draw(places)))
    spliced = MANIFEST[:a] + data.draw(st.one_of(st.binary(max_size=20), st.just(MANIFEST[a:b] * 2))) + MANIFEST[b:]
    with suppress(IntegrityError, IncompatibleError):
        Manifest.decode(spliced)


@pytest.mark.parametrize("flip", [0, 17, 100, -1])
def test_a_flipped_byte_of_a_blob_is_refused(folder: Path, flip: int) -> None:
    for blob in bundle()[0].blobs:
        path = folder / "blobs" / blob.digest
        data = bytearray(path.read_bytes())
        data[flip] ^= 1
        path.write_bytes(data)
        refused(folder, blob.digest)
        data[flip] ^= 1
        path.write_bytes(data)
    use(folder)


def test_a_blob_of_any_other_length_is_refused(folder: Path) -> None:
    path = folder / "blobs" / bundle()[0].blobs[0].digest
    data = path.read_bytes()
    for other in (*(data[:n] for n in range(0, len(data), 97)), data + b"\0", data * 2):
        path.write_bytes(other)
        refused(folder, "bytes")


def test_a_huge_sparse_blob_is_refused_before_it_is_read(folder: Path) -> None:
    os.truncate(folder / "blobs" / bundle()[0].blobs[0].digest, 1 << 40)
    started = time.process_time()
    refused(folder, "bytes")
    assert time.process_time() - started < 1


def test_a_huge_sparse_manifest_is_refused_before_it_is_read(folder: Path) -> None:
    os.truncate(folder / "manifest.msgpack", 1 << 30)
    tracemalloc.start()
    try:
        refused(folder, "bytes")
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_swapped_blobs_are_refused(folder: Path) -> None:
    first, second = (folder / "blobs" / b.digest for b in bundle()[0].blobs)
    assert first.stat().st_size == second.stat().st_size, "or the sizes would tell"
    first.rename(folder.parent / "x")
    second.rename(first)
    (folder.parent / "x").rename(second)
    refused(folder)


STRAYS = [
    "readme",
    ".hidden",
    ".tmp-xyz",
    ".tmp-0123456789abcdef0",
    "manifest.msgpack.bak",
    "blobs/readme",
    "blobs/" + "AB" * 32,
    "blobs/" + "ab" * 31,
    "blobs/" + "ab" * 32 + ".so",
    "blobs/.nfsxyz",
]


@pytest.mark.parametrize("name", STRAYS)
def test_an_unknown_file_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_text("x")
    refused(folder, "not part of a bundle")


def test_an_unknown_folder_is_refused(folder: Path) -> None:
    (folder / "blobs" / ("ab" * 32)).mkdir()
    refused(folder, "not part of a bundle")


def test_what_an_nfs_client_keeps_is_not_refused(folder: Path) -> None:
    (folder / "blobs/.nfs000000000000a1b200000001").write_text("x")
    use(folder)


def test_more_files_than_any_bundle_has_are_refused(folder: Path) -> None:
    for i in range(1100):
        (folder / "blobs" / f"{i:064x}").touch()
    refused(folder, "more than")


def _link(path: Path) -> None:
    path.rename(path.parent.parent / "moved")
    path.symlink_to(path.parent.parent / "moved")


def _dangling(path: Path) -> None:
    os.unlink(path)
    path.symlink_to("/nonexistent")


def _fifo(path: Path) -> None:
    os.unlink(path)
    os.mkfifo(path)


def _folder(path: Path) -> None:
    os.unlink(path)
    path.mkdir()


def _socket(path: Path) -> None:
    os.unlink(path)
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path has a short limit
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _device(path: Path) -> None:
    os.unlink(path)
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero: it never ends
    except PermissionError:
        pytest.skip("only root makes devices")


@pytest.mark.parametrize("become", [_link, _dangling, _fifo, _folder, _socket, _device])
@pytest.mark.parametrize("what", ["manifest.msgpack", "blob"])
def test_only_regular_files_are_opened(folder: Path, what: str, become: Callable[[Path], None]) -> None:
    path = folder / "blobs" / bundle()[0].blobs[0].digest if what == "blob" else folder / what
    become(path)
    refused(folder, "not a regular file|not part of a bundle")


@pytest.mark.parametrize("become", ["link", "fifo", "file"])
def test_only_a_folder_is_the_blobs_folder(folder: Path, become: str) -> None:
    (folder / "blobs").rename(folder.parent / "moved")
    if become == "link":
        (folder / "blobs").symlink_to(folder.parent / "moved")
    elif become == "fifo":
        os.mkfifo(folder / "blobs")
    else:
        (folder / "blobs").write_text("x")
    refused(folder, "not a folder")


def test_no_blobs_folder_at_all_is_refused(folder: Path) -> None:
    (folder / "blobs").rename(folder.parent / "moved")
    refused(folder, "missing")


def test_the_file_that_becomes_a_link_between_look_and_open_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of the kind is not what protects: the opening itself follows no link and waits for nobody."""
    honest = os.stat
    regular = honest(folder / "manifest.msgpack")

    def lie(name: object, **options: object) -> os.stat_result:
        return regular if name == "manifest.msgpack" else honest(name, **options)  # type: ignore[arg-type]

    for become in (_link, _fifo, _folder):
        published(folder.parent / become.__name__)
        become(folder.parent / become.__name__ / "manifest.msgpack")
        monkeypatch.setattr(os, "stat", lie)
        with pytest.raises(IntegrityError, match="not a regular file"):
            BundleReader.open(folder.parent / become.__name__)
        monkeypatch.undo()


@pytest.mark.parametrize(
    "name", ["../../../etc/passwd", "/etc/passwd", "blobs/x", ".", "", "\0" * 64, "ab" * 32 + "\n"]
)
def test_a_blob_name_that_is_no_digest_is_refused(folder: Path, name: str) -> None:
    value = bundle()[0].to_value()
    value["parts"][0]["blob"]["digest"] = name
    (folder / "manifest.msgpack").write_bytes(packed(value))
    refused(folder, "sha256")


def packed(value: object) -> bytes:
    """Canonical bytes of `value`, made without the package's own encoder."""

    def ordered(v: object) -> object:
        if isinstance(v, dict):
            return {k: ordered(v[k]) for k in sorted(v)}
        return [ordered(x) for x in v] if isinstance(v, list) else v

    return msgpack.packb(ordered(value))


def _text(value: str) -> bytes:
    return bytes([0xA0 | len(value)]) + value.encode()


def test_a_key_twice_is_refused() -> None:
    """msgpack takes the last one; two readers could see two bundles in one file."""
    assert MANIFEST[0] == 0x87, "a map of seven"
    for extra in (_text("version") + b"\x02", _text("zzz") + b"\xc0" + _text("zzz") + b"\xc0"):
        count = 7 + extra.count(b"\xa3zzz") + extra.count(b"\xa7version")
        with pytest.raises(IntegrityError, match="canonical"):
            Manifest.decode(bytes([0x80 | count]) + MANIFEST[1:] + extra)
    # One new key in its place is what a newer writer may add.
    Manifest.decode(b"\x88" + MANIFEST[1:] + _text("zzz") + b"\xc0")


def test_keys_in_another_order_are_refused() -> None:
    value = dict(reversed(list(bundle()[0].to_value().items())))
    with pytest.raises(IntegrityError, match="canonical"):
        Manifest.decode(msgpack.packb(value))


@pytest.mark.parametrize(
    "longer",
    [
        b"\xcc\x01",
        b"\xcd\x00\x01",
        b"\xce\x00\x00\x00\x01",
        b"\xcf" + bytes(7) + b"\x01",
        b"\xd0\x01",
        b"\xd3" + bytes(7) + b"\x01",
    ],
)
def test_a_longer_form_of_a_number_is_refused(longer: bytes) -> None:
    assert MANIFEST.count(_text("version") + b"\x01") == 1
    with pytest.raises(IntegrityError, match="canonical"):
        Manifest.decode(MANIFEST.replace(_text("version") + b"\x01", _text("version") + longer))


@pytest.mark.parametrize(
    "data",
    [
        MANIFEST + b"\xc0",
        MANIFEST + MANIFEST,
        b"\xdf\xff\xff\xff\xff" + MANIFEST[1:],
        b"\xc1",
        b"\xc7\x01\x05x",
        b"\xd4\xffx",
        b"\xca\x3f\x80\x00\x00",
        b"\x81\x01\x02",
        b"\x81\xc4\x01x\x02",
        b"\x81\xa2\xff\xfe\x02",
        b"\xa3\xed\xa0\x80",
    ],
)
def test_other_forms_of_msgpack_are_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        Manifest.decode(data)


def bombs() -> dict[str, Callable[[], bytes]]:
    """Manifests that are small to send and large, deep or slow to read."""
    full = MAX_MANIFEST_BYTES
    in_parts = MANIFEST[: MANIFEST.index(_text("parts")) + 6]
    return {
        "a list of 4 billion": lambda: b"\xdd\xff\xff\xff\xff",
        "a map of 4 billion": lambda: b"\xdf\xff\xff\xff\xff",
        "a string of 4 GB": lambda: b"\xdb\xff\xff\xff\xff" + bytes(100),
        "binary of 4 GB": lambda: b"\xc6\xff\xff\xff\xff" + bytes(100),
        "an extension of 4 GB": lambda: b"\xc9\xff\xff\xff\xff\x01" + bytes(100),
        "parts of 4 billion": lambda: in_parts + b"\xdd\xff\xff\xff\xff",
        "lists in lists": lambda: b"\x91" * full,
        "maps in maps": lambda: (b"\x81" + _text("a")) * (full // 3),
        "long lists in long lists": lambda: b"\xdd\x00\xff\xff\xff" * (full // 5),
        "longest lists in longest lists": lambda: b"\xdc\xff\xff" * (full // 3),
        "a million entries": lambda: in_parts + b"\xdd" + struct.pack(">I", 1_000_000) + b"\x80" * 1_000_000,
        "empty maps": lambda: (b"\xdc\xff\xff" + b"\x80" * 65535) * (full // 65538),
        "empty maps in a list of lists": lambda: b"\xdc\x00\xff" + (b"\xdc\xff\xff" + b"\x80" * 65535) * 255,
        "short strings": lambda: b"\xdc\x00\x7f" + (b"\xdc\xff\xff" + _text("ab") * 65535) * 80,
        "maps of short keys": lambda: (
            b"\xdc\x00\xff"
            + b"".join(b"\xde\xff\xff" + b"".join(b"\xa4%04x\xc0" % i for i in range(65535)) for _ in range(40))
        ),
        "too many bytes": lambda: bytes(full + 1),
    }


@pytest.mark.parametrize("name", bombs())
def test_a_bomb_is_refused_fast_and_in_little_memory(name: str) -> None:
    data = bombs()[name]()
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(IntegrityError):
            Manifest.decode(data)
        taken, (_, peak) = time.process_time() - started, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 400 << 20
    # Tracing slows it down several times.
    assert taken < 5


def test_a_million_real_entries_are_refused_within_a_second(folder: Path) -> None:
    value = bundle()[0].to_value()
    table = value["parts"][0]["tables"][0]
    entry = next(e for e in table["entries"] if e["choice"] == "library")
    prefix = packed(value)
    data = packed({**entry, "m": 1}) * 1_000_000
    with open(folder / "manifest.msgpack", "wb") as file:
        file.write(prefix)
        file.write(data)
    started = time.process_time()
    with pytest.raises(IntegrityError, match="bytes"):
        BundleReader.open(folder)
    assert time.process_time() - started < 1


def test_as_many_entries_as_are_allowed_are_read_and_one_more_is_not() -> None:
    value = bundle()[0].to_value()
    table = value["parts"][0]["tables"][0]
    last = table["entries"][-1]
    for count in (4096, 4097):
        filler = {**last, "choice": "library", "kernel": None}
        table["entries"] = [*({**filler, "m": m} for m in range(1, count)), {**last, "m": count}]
        used = {e["kernel"] for t in value["parts"][0]["tables"] for e in t["entries"]}
        value["parts"][0]["kernels"] = [k for k in value["parts"][0]["kernels"] if k["digest"] in used]
        if count == 4096:
            assert len(Manifest.decode(packed(value)).parts[0].tables[0].entries) == 4096
        else:
            with pytest.raises(IntegrityError, match="4097 items"):
                Manifest.decode(packed(value))


def test_bombs_stay_within_a_memory_limit_of_the_process(tmp_path: Path, root: Path) -> None:
    """Not what Python counts, but what the system gives: 700 MB of address space, imports included."""
    for i, make in enumerate(bombs().values()):
        (tmp_path / str(i)).write_bytes(make())
    program = """
import resource, sys
from gemmcache.bundle.interface import Manifest
from gemmcache.errors import IntegrityError
resource.setrlimit(resource.RLIMIT_AS, (700 << 20, 700 << 20))
for name in sys.argv[1:]:
    with open(name, "rb") as file:
        data = file.read()
    try:
        Manifest.decode(data)
    except IntegrityError as error:
        assert "MemoryError" not in error.message, name
    else:
        sys.exit("accepted")
"""
    command = [sys.executable, "-c", program, *map(str, sorted(tmp_path.iterdir()))]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}, check=True, timeout=60)


def test_a_declared_size_allocates_nothing(folder: Path) -> None:
    """The manifest claims a gigabyte; the file does not have it."""
    value = bundle()[0].to_value()
    value["parts"][0]["blob"]["size"] = 1 << 30
    (folder / "manifest.msgpack").write_bytes(packed(value))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(folder, "bytes")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_errors_say_what_to_do(folder: Path) -> None:
    os.unlink(folder / "blobs" / bundle()[0].blobs[0].digest)
    with pytest.raises(IntegrityError) as caught:
        BundleReader.open(folder)
    assert "copy the bundle again" in caught.value.remedy
    with pytest.raises(UsageError) as usage:
        BundleReader.open(folder / "blobs")
    assert usage.value.remedy
