"""Many writers, many readers, and writers that are killed: nobody ever sees a mix of two versions."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from gemmcache.bundle.reader import BundleReader
from gemmcache.bundle.verify import verify
from gemmcache.bundle.writer import publish
from tests.strategies_bundle import bundle, published

# The children only read or publish: threads of the parent that are missing in them don't matter.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

fork = multiprocessing.get_context("fork")
SECONDS = 4.0
WRITERS, READERS = 8, 4


def _publish_for_ever(folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    while True:
        published(folder, draw.randrange(1, 1000), real=False, filler=20_000)


def _read(folder: Path, until: float, result: Path) -> None:
    """Reads everything, over and over; writes how many versions were seen, or what was wrong."""
    seen: set[str] = set()
    try:
        while time.monotonic() < until:
            with BundleReader.open(folder) as reader:
                # The content tells which version a blob is of.
                salt = int(next(iter(reader.manifest.parts[0].kernels)).spec.config.as_dict().get("salt", -1))
                if salt < 0:
                    salt = int(reader.manifest.parts[0].kernels[1].spec.config["salt"])
                manifest, blobs = bundle(salt, real=False, filler=20_000)
                assert reader.manifest == manifest
                for blob in reader.manifest.blobs:
                    assert reader.read_blob(blob) == blobs[blob.digest]
                seen.add(reader.digest)
    except BaseException as error:
        result.write_text(f"{type(error).__name__}: {error}")
        raise
    result.write_text(str(len(seen)))


def _start(target: object, *arguments: object) -> ForkProcess:
    process = fork.Process(target=target, args=arguments)
    process.start()
    return process


def test_readers_never_see_a_mix_while_writers_race_and_die(tmp_path: Path) -> None:
    folder = tmp_path / "b"
    published(folder, 1, real=False, filler=20_000)
    until = time.monotonic() + SECONDS
    readers = [_start(_read, folder, until, tmp_path / f"result{i}") for i in range(READERS)]
    writers = [_start(_publish_for_ever, folder, i) for i in range(WRITERS)]
    draw = random.Random(0)
    kills = 0
    try:
        # Longer on a busy machine: as many deaths, whatever else it does.
        while time.monotonic() < until or (kills <= 20 and time.monotonic() < until + 10 * SECONDS):
            time.sleep(draw.uniform(0.005, 0.05))
            i = draw.randrange(WRITERS)
            assert writers[i].exitcode is None, "a writer failed"
            os.kill(writers[i].pid or 0, signal.SIGKILL)
            writers[i].join()
            kills += 1
            writers[i] = _start(_publish_for_ever, folder, WRITERS + kills)
        for reader in readers:
            reader.join(60)
    finally:
        for process in (*writers, *readers):
            process.kill()
            process.join()
    results = [(tmp_path / f"result{i}").read_text() for i in range(READERS)]
    assert all(r.isdigit() for r in results), results
    assert max(map(int, results)) > 5, "hardly anything was published"
    assert kills > 20
    report = verify(folder)
    assert all("ELF" in p for p in report.problems)
    published(folder, 1000, real=False)
    report = verify(folder)
    assert not report.orphans
    assert not report.leftovers


def _build(folder: Path, salt: int, result: Path) -> None:
    manifest, blobs = bundle(salt, real=False)
    result.write_text(publish(folder, manifest, blobs, renumber=True))


def test_sixteen_builds_of_one_content_make_one_bundle(tmp_path: Path) -> None:
    folder = tmp_path / "b"
    builds = [_start(_build, folder, 7, tmp_path / f"r{i}") for i in range(16)]
    for build in builds:
        build.join(60)
    assert {b.exitcode for b in builds} == {0}
    digests = {(tmp_path / f"r{i}").read_text() for i in range(16)}
    with BundleReader.open(folder) as reader:
        assert digests == {reader.digest}
        assert reader.manifest.version == 1


def test_concurrent_builds_of_different_contents_get_different_versions(tmp_path: Path) -> None:
    folder = tmp_path / "b"
    builds = [_start(_build, folder, salt, tmp_path / f"r{salt}") for salt in range(1, 13)]
    for build in builds:
        build.join(60)
    assert {b.exitcode for b in builds} == {0}
    with BundleReader.open(folder) as reader:
        assert reader.manifest.version == 12
