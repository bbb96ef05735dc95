"""`verify`: what it finds, and the ELF reader behind it."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmcache.bundle import elf
from gemmcache.bundle.interface import Blob
from gemmcache.bundle.verify import verify
from gemmcache.bundle.writer import publish
from gemmcache.errors import IncompatibleError, IntegrityError, UsageError
from gemmcache.target import Host
from tests.strategies_bundle import bundle, digest_of, published, shared_object


def test_a_good_bundle(tmp_path: Path) -> None:
    manifest = published(tmp_path / "b")
    report = verify(tmp_path / "b")
    assert report.ok
    assert not report.problems
    assert [(b.digest, b.size, b.kernels) for b in report.blobs] == [(b.digest, b.size, 2) for b in manifest.blobs]
    assert (report.name, report.version) == ("example", 1)


def test_orphans_and_leftovers_are_reported_and_do_no_harm(tmp_path: Path) -> None:
    published(tmp_path / "b")
    data = b"from a killed publication"
    (tmp_path / "b/blobs" / digest_of(data)).write_bytes(data)
    (tmp_path / "b/.tmp-0123456789abcdef").write_bytes(b"half")
    (tmp_path / "b/blobs/.tmp-0123456789abcdef").write_bytes(b"half")
    report = verify(tmp_path / "b")
    assert report.ok
    assert [(o.digest, o.size) for o in report.orphans] == [(digest_of(data), len(data))]
    assert sorted(report.leftovers) == [".tmp-0123456789abcdef", "blobs/.tmp-0123456789abcdef"]


def test_an_orphan_is_hashed(tmp_path: Path) -> None:
    published(tmp_path / "b")
    (tmp_path / "b/blobs" / ("ab" * 32)).write_bytes(b"planted")
    report = verify(tmp_path / "b")
    assert not report.ok
    assert "ab" * 32 in report.problems[0]


def test_every_damaged_blob_is_reported(tmp_path: Path) -> None:
    manifest = published(tmp_path / "b")
    for blob in manifest.blobs:
        path = tmp_path / "b/blobs" / blob.digest
        path.write_bytes(path.read_bytes()[::-1])
    report = verify(tmp_path / "b")
    assert len(report.problems) == 2
    assert all(any(b.digest in p for p in report.problems) for b in manifest.blobs)


def _with_blob(folder: Path, data: bytes) -> tuple[str, ...]:
    """Problems of a bundle whose first part has `data` for its blob."""
    manifest, blobs = bundle()
    part = manifest.parts[0]
    assert part.blob is not None
    del blobs[part.blob.digest]
    blobs[digest_of(data)] = data
    part = replace(part, blob=Blob(digest_of(data), len(data)))
    publish(folder, replace(manifest, parts=(part, manifest.parts[1])), blobs)
    return verify(folder).problems


def test_a_blob_must_export_every_kernel(tmp_path: Path) -> None:
    first, second = bundle()[0].parts[0].kernels
    problems = _with_blob(tmp_path / "b", shared_object((first.symbol,)))
    assert len(problems) == 1
    assert second.symbol in problems[0]
    # Named, but not defined here.
    data = shared_object((first.symbol,), f"extern int {second.symbol}(void); int (*p)(void) = {second.symbol};")
    problems = _with_blob(tmp_path / "c", data)
    assert len(problems) == 1
    assert second.symbol in problems[0]


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"not ELF" * 20, "magic"), (b"\x7fELF", "too short"), (b"\x7fELF\x01\x01" + bytes(60), "64-bit")],
)
def test_a_blob_must_be_an_elf_file(tmp_path: Path, data: bytes, text: str) -> None:
    problems = _with_blob(tmp_path / "b", data)
    assert len(problems) == 1
    assert text in problems[0]


def test_a_blob_must_be_for_the_host(tmp_path: Path) -> None:
    manifest, blobs = bundle()
    data = next(iter(blobs.values()))
    other = bytearray(data)
    struct.pack_into("<H", other, 18, 183)
    assert any("183" in p for p in _with_blob(tmp_path / "b", bytes(other)))
    grace = replace(manifest.parts[0], host=Host("aarch64", "aarch64", "gnu"))
    publish(tmp_path / "c", replace(manifest, parts=(grace,)), {b.digest: blobs[b.digest] for b in (grace.blob,) if b})
    assert any("aarch64" in p for p in verify(tmp_path / "c").problems)


def test_a_kernel_must_have_the_digest_of_its_spec(tmp_path: Path) -> None:
    manifest, blobs = bundle()
    part = replace(manifest.parts[0], toolchain=replace(manifest.parts[0].toolchain, dsl="4.9.0"))
    publish(tmp_path / "b", replace(manifest, parts=(part, manifest.parts[1])), blobs)
    problems = verify(tmp_path / "b").problems
    assert len(problems) == 2
    assert all("digest" in p for p in problems)


def test_what_is_no_finding_is_raised(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        verify(tmp_path / "absent")
    published(tmp_path / "b")
    path = tmp_path / "b/manifest.msgpack"
    path.write_bytes(path.read_bytes().replace(b"\xa5major\x01", b"\xa5major\x02"))
    with pytest.raises(IncompatibleError):
        verify(tmp_path / "b")


def test_exports_are_what_the_compiler_exported() -> None:
    exported = elf.exports(shared_object(("one", "two"), "static int three; extern int four; int *p = &four;"))
    assert set(exported) == {"one", "two", "p"}
    assert exported["one"] < exported["two"]


@given(st.data())
def test_a_damaged_elf_file_is_an_integrity_error_or_read(data: st.DataObject) -> None:
    """Never another exception, whatever the headers claim."""
    image = bytearray(shared_object(("one", "two")))
    sections = struct.unpack_from("<Q", image, 40)[0]
    places = st.one_of(st.integers(0, 63), st.integers(sections, len(image) - 1), st.integers(0, len(image) - 1))
    for _ in range(data.draw(st.integers(1, 4))):
        image[data.draw(places)] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(image)), st.integers(0, len(image))))
    for read in (elf.exports, elf.gpu_images):
        try:
            read(bytes(image[:cut]))
        except IntegrityError:
            continue
