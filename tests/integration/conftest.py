"""Bundles that the integration tests share: every kernel is compiled once, also where several processes test."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.integration.commands import environment, gemmcache, install_toy

LLAMA = ROOT / "artifacts" / "models" / "llama-3.1-8b"


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this test run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@contextmanager
def alone(place: Path) -> Iterator[None]:
    """One process of the test run at a time."""
    with open(place / "gemmcache.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def cache(place: Path) -> Path:
    return place / "gemmcache-cache"


@pytest.fixture(autouse=True)
def own_folders(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test looks at the caches and records of who runs it."""
    monkeypatch.setenv("GEMMCACHE_CACHE_DIR", str(cache))
    monkeypatch.setenv("GEMMCACHE_RECORDS_DIR", str(tmp_path / "records"))
    monkeypatch.delenv("GEMMCACHE_STRICT", raising=False)


def _built(place: Path, cache: Path, name: str, *arguments: str) -> dict[str, Any]:
    """What `build --json` said about the bundle `name` of this test run."""
    told = place / f"gemmcache-{name}.json"
    with alone(place):
        if not told.exists():
            env = environment(cache, place / "no-records")
            done = gemmcache("build", *arguments, "--out", place / f"gemmcache-{name}", "--json", env=env)
            assert done.returncode == 0, done.stderr
            told.write_text(done.stdout)
    value: dict[str, Any] = json.loads(told.read_text())
    return value


@pytest.fixture(scope="session")
def llama(place: Path, cache: Path) -> dict[str, Any]:
    """What `build --json` told about Llama-3.1-8B for an H200 from the shipped records; do not change the bundle."""
    return _built(place, cache, "llama", str(LLAMA), "--fuse", "--target", "h200")


@pytest.fixture(scope="session")
def three_targets(place: Path, cache: Path) -> dict[str, Any]:
    """The same for three arches and two families of problems at m = 16: one that is tuned on an H200, one nowhere."""
    return _built(place, cache, "three", *THREE, str(three_source(place)))


#: Options of the bundle for three targets.
THREE = ("--target=h200", "--target=b200", "--target=a100")


def three_source(folder: Path) -> Path:
    """The list of problems of the bundle for three targets, written into `folder`."""
    path = folder / "three.json"
    path.write_text(json.dumps([{"n": 4096, "k": 4096, "ms": [16]}, {"n": 256, "k": 128, "ms": [16]}]))
    return path


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return install_toy(tmp_path / "site")
