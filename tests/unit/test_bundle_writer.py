"""Publishing bundles."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gemmcache.bundle import fs
from gemmcache.bundle.reader import BundleReader
from gemmcache.bundle.verify import verify
from gemmcache.bundle.writer import check_destination, next_version, publish, version_for
from gemmcache.errors import IncompatibleError, IntegrityError, StorageError, UsageError
from tests.strategies_bundle import bundle, digest_of, published


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of change of every file below `folder`."""
    return {
        str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns)
        for p in sorted(folder.rglob("*"))
        if p.is_file() and not p.is_symlink()
    }


def test_publish_returns_the_digest_and_leaves_nothing_else(tmp_path: Path) -> None:
    manifest, blobs = bundle()
    digest = publish(tmp_path / "deep/er/b", manifest, blobs)
    assert digest == digest_of(manifest.encode())
    found = {name: data for name, (data, _) in tree(tmp_path / "deep/er/b").items()}
    assert found == {"manifest.msgpack": manifest.encode(), **{f"blobs/{d}": b for d, b in blobs.items()}}
    assert verify(tmp_path / "deep/er/b").ok


def test_files_are_readable_by_everyone(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        published(tmp_path / "b")
    finally:
        os.umask(old)
    for path in [tmp_path / "b", *(tmp_path / "b").rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644)


def test_blobs_can_be_given_as_files(tmp_path: Path) -> None:
    manifest, blobs = bundle()
    for digest, data in blobs.items():
        (tmp_path / digest[:8]).write_bytes(data)
    publish(tmp_path / "b", manifest, {d: tmp_path / d[:8] for d in blobs})
    assert verify(tmp_path / "b").ok


def test_publishing_the_same_again_changes_nothing(tmp_path: Path) -> None:
    published(tmp_path / "b")
    before = tree(tmp_path / "b")
    published(tmp_path / "b")
    assert tree(tmp_path / "b") == before


def test_blobs_of_the_version_before_go_and_shared_ones_stay(tmp_path: Path) -> None:
    first, blobs = bundle(1, real=False)
    second, more = bundle(2, real=False)
    both = replace(first, parts=(first.parts[0], second.parts[1]))
    publish(tmp_path / "b", first, blobs)
    publish(tmp_path / "b", both, {b.digest: {**blobs, **more}[b.digest] for b in both.blobs})
    assert sorted(os.listdir(tmp_path / "b/blobs")) == [b.digest for b in both.blobs]


def test_a_bundle_without_kernels_can_be_published(tmp_path: Path) -> None:
    manifest = bundle()[0]
    empty = replace(manifest.parts[0], blob=None, kernels=(), tables=())
    publish(tmp_path / "b", replace(manifest, parts=(empty,)), {})
    assert verify(tmp_path / "b").ok
    os.rmdir(tmp_path / "b/blobs")  # as archives do
    assert verify(tmp_path / "b").ok


def test_versions(tmp_path: Path) -> None:
    first, blobs = bundle(1, real=False)
    second, more = bundle(2, real=False)
    assert next_version(tmp_path / "b") == 1
    assert version_for(tmp_path / "b", replace(first, version=9)).version == 1
    (tmp_path / "b").mkdir()
    assert next_version(tmp_path / "b") == 1
    publish(tmp_path / "b", replace(first, version=4), blobs)
    assert next_version(tmp_path / "b") == 5
    assert version_for(tmp_path / "b", first).version == 4
    assert version_for(tmp_path / "b", second).version == 5
    digest = publish(tmp_path / "b", first, blobs, renumber=True)
    assert digest == digest_of(replace(first, version=4).encode())
    digest = publish(tmp_path / "b", second, more, renumber=True)
    assert digest == digest_of(replace(second, version=5).encode())


def test_the_last_version_has_no_next(tmp_path: Path) -> None:
    manifest, blobs = bundle(real=False)
    publish(tmp_path / "b", replace(manifest, version=(1 << 53) - 1), blobs)
    with pytest.raises(UsageError, match="last"):
        next_version(tmp_path / "b")


def test_a_damaged_bundle_has_no_next_version_and_can_be_repaired(tmp_path: Path) -> None:
    manifest, blobs = bundle()
    publish(tmp_path / "b", manifest, blobs)
    for path in (tmp_path / "b").rglob("*"):
        if path.is_file():
            path.write_bytes(b"\xc1" * 10)
    with pytest.raises(IntegrityError) as caught:
        version_for(tmp_path / "b", manifest)
    assert "another folder" in caught.value.remedy
    publish(tmp_path / "b", manifest, blobs)
    assert verify(tmp_path / "b").ok


def test_a_bundle_of_another_format_has_no_next_version(tmp_path: Path) -> None:
    published(tmp_path / "b")
    data = (tmp_path / "b/manifest.msgpack").read_bytes()
    (tmp_path / "b/manifest.msgpack").write_bytes(data.replace(b"\xa5major\x01", b"\xa5major\x02"))
    with pytest.raises(IncompatibleError):
        next_version(tmp_path / "b")


def _write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("precious")


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a file": lambda b: _write(b / "thesis.tex"),
    "a hidden file": lambda b: _write(b / ".profile"),
    "a file in blobs": lambda b: _write(b / "blobs/readme"),
    "blobs is a file": lambda b: _write(b / "blobs"),
    "a link for blobs": lambda b: (b.mkdir(), (b / "blobs").symlink_to("/tmp")),
    "a link for the manifest": lambda b: (b.mkdir(), (b / "manifest.msgpack").symlink_to("/etc/hostname")),
    "a folder for a blob": lambda b: (b / "blobs" / ("ab" * 32)).mkdir(parents=True),
    "the folder is a file": _write,
    "a bundle and a file": lambda b: (published(b), _write(b / "notes")),
    "very many files": lambda b: [_write(b / "blobs" / f"{i:064x}") for i in range(1100)],
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_with_anything_else_in_it_is_not_touched(tmp_path: Path, name: str) -> None:
    FOREIGN[name](tmp_path / "b")

    def everything() -> tuple[dict[str, tuple[bytes, int]], list[str]]:
        found = {k: v for k, v in tree(tmp_path).items() if k != ".b.lock"}
        return found, sorted(str(p) for p in tmp_path.rglob("*") if p.name != ".b.lock")

    before = everything()
    manifest, blobs = bundle(5)
    with pytest.raises(UsageError):
        publish(tmp_path / "b", manifest, blobs)
    assert everything() == before


def test_what_a_killed_first_publication_left_is_no_obstacle(tmp_path: Path) -> None:
    manifest, blobs = bundle()
    for name in ("blobs/.tmp-0123456789abcdef", ".tmp-0123456789abcdef", f"blobs/{manifest.blobs[0].digest}"):
        _write(tmp_path / "b" / name)
    publish(tmp_path / "b", manifest, blobs)
    report = verify(tmp_path / "b")
    assert report.ok
    assert not report.leftovers
    assert not report.orphans


def test_orphans_of_killed_publications_do_not_pile_up(tmp_path: Path) -> None:
    published(tmp_path / "b")
    for i in range(1000):
        _write(tmp_path / "b/blobs" / f"{i:064x}")
    published(tmp_path / "b")
    assert len(os.listdir(tmp_path / "b/blobs")) == 2


@pytest.mark.parametrize("change", ["missing", "extra", "wrong", "short", "long"])
def test_blobs_must_be_those_of_the_manifest(tmp_path: Path, change: str) -> None:
    published(tmp_path / "b")
    before = tree(tmp_path / "b")
    manifest, blobs = bundle(1)
    digest, data = sorted(blobs.items())[0]
    if change == "missing":
        del blobs[digest]
    elif change == "extra":
        blobs["ab" * 32] = b"x"
    else:
        blobs[digest] = {"wrong": data[:-1] + b"\xff", "short": data[:-1], "long": data + b"\0"}[change]
    with pytest.raises(UsageError if change in ("missing", "extra") else IntegrityError):
        publish(tmp_path / "b", manifest, blobs)
    after = tree(tmp_path / "b")
    assert {k: v for k, v in after.items() if k in before} == before
    assert not any(".tmp" in name for name in after)
    assert verify(tmp_path / "b").ok


def test_a_manifest_that_no_reader_takes_is_not_published(tmp_path: Path) -> None:
    manifest, blobs = bundle()
    with pytest.raises(UsageError, match="can't be published"):
        publish(tmp_path / "b", replace(manifest, version=0), blobs)
    assert not (tmp_path / "b").exists()


def test_a_writer_waits_and_then_gives_up(tmp_path: Path) -> None:
    published(tmp_path / "b")
    before = tree(tmp_path / "b")
    manifest, blobs = bundle(1)
    (tmp_path / "link").symlink_to(tmp_path / "b")
    with open(tmp_path / ".b.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for path in (tmp_path / "b", tmp_path / "link"):
            with pytest.raises(StorageError, match="lock"):
                publish(path, manifest, blobs, lock_timeout_s=0.05)
        assert tree(tmp_path / "b") == before
    publish(tmp_path / "link", manifest, blobs, lock_timeout_s=0)
    with BundleReader.open(tmp_path / "b") as reader:
        assert reader.manifest == manifest


def test_the_order_of_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blobs are on the disk before the manifest is renamed, and old ones go after that is."""
    old, new = published(tmp_path / "b", real=False), bundle(1, real=False)
    calls: list[tuple[str, str]] = []
    monkeypatch.setattr(fs, "before", lambda call, name: calls.append((call, name)))
    publish(tmp_path / "b", *new)
    commit = calls.index(("rename", "manifest.msgpack"))
    for blob in new[0].blobs:
        wanted = [calls.index((call, blob.digest)) for call in ("write", "chmod", "fsync", "rename")]
        assert [*wanted, calls.index(("fsync", "blobs"))] == sorted([*wanted, calls.index(("fsync", "blobs"))])
        assert wanted[-1] < calls.index(("fsync", "blobs")) < commit
    assert calls.index(("fsync", "manifest.msgpack")) < commit
    assert ("fsync", "b") in calls[commit:]
    assert [c for c in calls if c[0] == "unlink"] == [("unlink", b.digest) for b in old.blobs]
    assert all(calls.index(("unlink", b.digest)) > commit for b in old.blobs)


def test_two_builds_in_two_folders_are_equal(tmp_path: Path) -> None:
    published(tmp_path / "one")
    published(tmp_path / "two/other")
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two/other")
    assert {k: v[0] for k, v in one.items()} == {k: v[0] for k, v in two.items()}


def test_root_is_no_bundle() -> None:
    manifest, blobs = bundle()
    with pytest.raises(UsageError):
        publish("/", manifest, blobs)


def test_a_destination_is_checked_before_anything_is_made(tmp_path: Path) -> None:
    check_destination(tmp_path / "not/there/yet")
    assert list(tmp_path.iterdir()) == []
    folder = tmp_path / "b"
    published(folder)
    before = tree(folder)
    check_destination(folder)
    assert tree(folder) == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt"):
        check_destination(tmp_path / "other")
    for place in (tmp_path / "other/notes.txt", tmp_path / "other/notes.txt/b"):
        with pytest.raises(UsageError, match="not a folder"):
            check_destination(place)
