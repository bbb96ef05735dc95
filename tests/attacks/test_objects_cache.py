"""Damaged, forged and odd entries of the object cache, and a linker or disk that fails: a miss or a typed error."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gemmcache.build import link as linking
from gemmcache.build.objects import ObjectCache
from gemmcache.errors import StorageError, ToolError, UsageError
from tests.conftest import ROOT

ONE, TWO = "1" * 64, "2" * 64
DATA = bytes(range(256)) * 3


@pytest.fixture
def cache(tmp_path: Path) -> ObjectCache:
    cache = ObjectCache(tmp_path / "objects")
    cache.put(ONE, DATA)
    assert cache.get(ONE) == DATA
    return cache


def test_an_entry_truncated_anywhere_is_a_miss(cache):
    path = cache.folder / f"{ONE}.o"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert cache.get(ONE) is None
    path.write_bytes(whole + b"\0")
    assert cache.get(ONE) is None


def test_an_entry_with_any_byte_changed_is_a_miss_until_it_is_put_again(cache):
    path = cache.folder / f"{ONE}.o"
    whole = path.read_bytes()
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 0x40]) + whole[i + 1 :])
        assert cache.get(ONE) is None
    cache.put(ONE, DATA)
    assert cache.get(ONE) == DATA


def test_an_entry_under_another_kernels_name_is_a_miss(cache):
    os.rename(cache.folder / f"{ONE}.o", cache.folder / f"{TWO}.o")
    assert cache.get(TWO) is None
    assert cache.get(ONE) is None


def test_what_is_no_file_is_a_miss_and_never_waited_for(cache):
    path = cache.folder / f"{TWO}.o"
    os.mkfifo(path)
    code = "import sys; from pathlib import Path; from gemmcache.build.objects import ObjectCache\n"
    code += "sys.exit(ObjectCache(Path(sys.argv[1])).get(sys.argv[2]) is not None)"
    # In a process that can be ended, should it wait for a writer.
    subprocess.run([sys.executable, "-c", code, str(cache.folder), TWO], timeout=20, check=True, cwd=ROOT)
    cache.put(TWO, DATA)
    assert cache.get(TWO) == DATA
    path.unlink()
    path.mkdir()
    assert cache.get(TWO) is None
    # Can't be replaced: quietly nothing, and nothing left beside it.
    cache.put(TWO, DATA)
    assert cache.get(TWO) is None
    path.rmdir()
    path.symlink_to("/dev/zero")
    assert cache.get(TWO) is None
    assert sorted(os.listdir(cache.folder)) == [f"{ONE}.o", f"{TWO}.o"]


def test_a_link_is_replaced_and_not_written_through(cache, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (cache.folder / f"{TWO}.o").symlink_to(victim)
    cache.put(TWO, DATA)
    assert victim.read_bytes() == b"mine"
    assert cache.get(TWO) == DATA


@pytest.mark.parametrize("name", ["", "../" + "1" * 61, "/etc/passwd", "1" * 63, "G" * 64, "1" * 64 + "/x"])
def test_names_are_digests_only(cache, name):
    with pytest.raises(UsageError):
        cache.get(name)
    with pytest.raises(UsageError):
        cache.put(name, DATA)


@pytest.mark.parametrize("call", ["mkstemp", "fdopen", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_refuses_costs_nothing_and_leaves_nothing(cache, monkeypatch, call, number):
    def refuse(*_args, **_kwargs):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(tempfile if call == "mkstemp" else os, call, refuse)
        cache.put(TWO, DATA)
        cache.put(ONE, DATA * 2)
    assert cache.get(TWO) is None
    assert cache.get(ONE) == DATA
    assert os.listdir(cache.folder) == [f"{ONE}.o"]


def test_no_linker_is_a_tool_error_with_a_remedy(monkeypatch):
    monkeypatch.setattr(linking.shutil, "which", lambda name: None)
    monkeypatch.setattr(linking, "find_spec", lambda name: None)
    with pytest.raises(ToolError, match="binutils"):
        linking.link({ONE: DATA})


def test_bytes_that_are_no_object_are_a_tool_error():
    with pytest.raises(ToolError, match="failed"):
        linking.link({ONE: b"not an object"})


def test_a_linker_that_can_not_be_run_is_a_tool_error(monkeypatch):
    monkeypatch.setattr(linking, "linker", lambda: ["/nonexistent/ld", "-shared"])
    with pytest.raises(ToolError, match="/nonexistent/ld"):
        linking.link({ONE: DATA})


def test_a_temporary_folder_that_can_not_be_written_is_a_storage_error(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    with pytest.raises(StorageError, match="link"):
        linking.link({ONE: DATA})
