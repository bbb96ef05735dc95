"""Directories of a user: overrides, XDG, and no usable HOME."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from gemmcache import paths
from gemmcache.errors import StorageError

_VARIABLES = ("GEMMCACHE_CACHE_DIR", "GEMMCACHE_RECORDS_DIR", "XDG_CACHE_HOME", "XDG_DATA_HOME", "HOME")


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in _VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


def test_own_variables_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("GEMMCACHE_CACHE_DIR", str(tmp_path / "c"))
    monkeypatch.setenv("GEMMCACHE_RECORDS_DIR", str(tmp_path / "r"))
    assert paths.cache_dir() == tmp_path / "c"
    assert paths.records_dir() == tmp_path / "r"


def test_xdg_then_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.cache_dir() == tmp_path / ".cache/gemmcache"
    assert paths.records_dir() == tmp_path / ".local/share/gemmcache/records"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xc"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xd"))
    assert paths.cache_dir() == tmp_path / "xc/gemmcache"
    assert paths.data_dir() == tmp_path / "xd/gemmcache"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert paths.cache_dir() == tmp_path / ".cache/gemmcache"


@pytest.mark.parametrize("home", [None, "", "/dev/null", "/proc/none", "relative"])
def test_no_usable_home(home: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if home is not None:
        monkeypatch.setenv("HOME", home)
    private = tmp_path / "tmp" / f"gemmcache-{os.getuid()}"
    assert paths.cache_dir() == private / "cache"
    assert paths.records_dir() == private / "data" / "records"
    assert private.stat().st_mode & 0o077 == 0


def test_a_planted_temporary_directory_is_not_used(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    planted = tmp_path / "tmp" / f"gemmcache-{os.getuid()}"
    planted.symlink_to(elsewhere)
    found = paths.cache_dir()
    assert planted not in found.parents
    planted.unlink()
    planted.mkdir()
    planted.chmod(0o777)
    assert planted not in paths.cache_dir().parents


def test_nowhere_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    with pytest.raises(StorageError, match="GEMMCACHE_CACHE_DIR"):
        paths.cache_dir()
