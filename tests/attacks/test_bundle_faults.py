"""Publishing that is interrupted at every call to the file system: the old bundle or the new one, whole."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gemmcache.bundle import fs
from gemmcache.bundle.reader import BundleReader
from gemmcache.bundle.verify import verify
from gemmcache.bundle.writer import publish
from gemmcache.errors import StorageError, UsageError
from tests.strategies_bundle import bundle, published

# The children only publish and end: threads of the parent that are missing in them don't matter.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

#: Small pieces, so that blobs and manifests are cut in their middle too.
PIECE = 1500
FILLER = 2000


class Faults:
    """Counts calls that change something; fails the `at`-th, and the later ones too if `lasting`: a full disk."""

    def __init__(self, at: int = 0, number: int = 0, lasting: bool = False) -> None:
        self.at, self.number, self.lasting = at, number, lasting
        self.calls: list[str] = []

    def __call__(self, call: str, name: str) -> None:
        self.calls.append(call)
        hit = len(self.calls) >= self.at if self.lasting else len(self.calls) == self.at
        if self.at and hit:
            raise OSError(self.number, os.strerror(self.number))


def count_calls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of a publication over an older bundle."""
    published(folder, 1, real=False, filler=FILLER)
    faults = Faults()
    monkeypatch.setattr(fs, "before", faults)
    published(folder, 2, real=False, filler=FILLER)
    monkeypatch.setattr(fs, "before", None)
    return faults.calls


def whole(folder: Path) -> int:
    """Which of the versions 1 and 2 `folder` holds, every byte of it."""
    for salt in (1, 2):
        manifest, blobs = bundle(salt, real=False, filler=FILLER)
        with BundleReader.open(folder) as reader:
            if reader.manifest == manifest:
                assert {b.digest: reader.read_blob(b) for b in manifest.blobs} == blobs
                # These blobs are no ELF files: that is the only complaint.
                assert all("ELF" in p for p in verify(folder).problems)
                return salt
    raise AssertionError("neither version")


@pytest.mark.parametrize(("number", "lasting"), [(errno.ENOSPC, True), (errno.EIO, False), (errno.EROFS, True)])
def test_an_error_at_any_call_leaves_a_whole_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, lasting: bool
) -> None:
    monkeypatch.setattr(fs, "CHUNK", PIECE)
    calls = count_calls(tmp_path / "count", monkeypatch)
    assert {"write", "fsync", "rename", "create", "mkdir", "lock", "unlink"} <= set(calls)
    assert calls.count("write") >= 5
    commit = len(calls) - 1 - calls[::-1].index("rename")
    for at in range(1, len(calls) + 1):
        folder = tmp_path / str(at)
        published(folder, 1, real=False, filler=FILLER)
        monkeypatch.setattr(fs, "before", Faults(at, number, lasting))
        if calls[at - 1] == "unlink":
            published(folder, 2, real=False, filler=FILLER)
        else:
            with pytest.raises(StorageError) as caught:
                published(folder, 2, real=False, filler=FILLER)
            assert os.strerror(number) in caught.value.message
        monkeypatch.setattr(fs, "before", None)
        assert whole(folder) == (1 if at <= commit + 1 else 2)
        published(folder, 2, real=False, filler=FILLER)
        assert whole(folder) == 2
        report = verify(folder)
        assert not report.orphans
        assert not report.leftovers


def test_an_error_at_any_call_of_the_first_publication_leaves_no_bundle_or_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs, "CHUNK", PIECE)
    counting = Faults()
    monkeypatch.setattr(fs, "before", counting)
    published(tmp_path / "count", 2, real=False, filler=FILLER)
    for at in range(1, len(counting.calls) + 1):
        folder = tmp_path / str(at)
        monkeypatch.setattr(fs, "before", Faults(at, errno.ENOSPC, lasting=True))
        with pytest.raises(StorageError):
            published(folder, 2, real=False, filler=FILLER)
        monkeypatch.setattr(fs, "before", None)
        if (folder / "manifest.msgpack").exists():
            assert whole(folder) == 2
        else:
            with pytest.raises(UsageError):
                BundleReader.open(folder)
        published(folder, 2, real=False, filler=FILLER)
        assert whole(folder) == 2


def _publish_and_die(folder: Path, at: int, partial: bool) -> None:
    """In a child: publishes version 2 and ends at call number `at`, with no clean-up of any kind."""
    calls = 0

    def die(call: str, name: str) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            os._exit(9)

    fs.CHUNK = PIECE if partial else fs.CHUNK
    fs.before = die
    published(folder, 2, real=False, filler=FILLER)
    os._exit(0)


def test_death_at_any_call_leaves_a_whole_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork = multiprocessing.get_context("fork")
    at, deaths, seen = 0, 0, set()
    while True:
        at += 1
        folder = tmp_path / str(at)
        published(folder, 1, real=False, filler=FILLER)
        child = fork.Process(target=_publish_and_die, args=(folder, at, True))
        child.start()
        child.join()
        if child.exitcode == 0:
            break
        assert child.exitcode == 9
        deaths += 1
        seen.add(whole(folder))
        # The lock died with its holder.
        published(folder, 2, real=False, filler=FILLER)
        assert whole(folder) == 2
        assert not verify(folder).leftovers
    assert deaths > 20
    assert seen == {1, 2}


def test_death_over_and_over_never_makes_the_folder_unreadable(tmp_path: Path) -> None:
    """Each time with other blobs, just before the manifest: orphans must not pile up."""
    program = """
import os, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from gemmcache.bundle import fs
from tests.strategies_bundle import published
def die(call, name):
    if (call, name) == ("rename", "manifest.msgpack"):
        raise SystemExit
for salt in range(3, 40):
    fs.before = die
    try:
        published(Path(sys.argv[1]), salt, real=False)
    except SystemExit:
        pass
"""
    folder = tmp_path / "b"
    published(folder, 1, real=False, filler=FILLER)
    root = str(Path(__file__).resolve().parents[2])
    subprocess.run([sys.executable, "-c", program, str(folder), root], check=True)
    assert whole(folder) == 1
    assert len(os.listdir(folder / "blobs")) <= 4


def test_a_full_disk_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs, "before", Faults(1, errno.ENOSPC))
    manifest, blobs = bundle(real=False)
    with pytest.raises(StorageError, match="No space left") as caught:
        publish(tmp_path / "b", manifest, blobs)
    assert "free some space" in caught.value.remedy
