"""Builds that race, builds that are killed, and loaders that look on: there is always one whole bundle."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gemmcache.bundle.reader import BundleReader
from gemmcache.bundle.verify import verify
from tests.integration.commands import RUN, environment, gemmcache, install_toy, needs_compiler, python

pytestmark = needs_compiler

MS = {"small": (16,), "large": (16, 32, 64, 128)}
TARGETS = ("--target=h200", "--target=b200")


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with the toy kernels installed, and all of them in the object cache."""
    place = tmp_path_factory.mktemp("warm")
    env = environment(place / "cache", place / "records", install_toy(place / "site"))
    done = gemmcache("build", listed(place), *TARGETS, "--out", place / "b", env=env)
    assert done.returncode == 0, done.stderr
    return env


def listed(folder: Path) -> Path:
    path = folder / "problems.json"
    path.write_text(json.dumps([{"n": 256, "k": 128, "dtype": "fp32", "ms": MS["large"]}]))
    return path


def command(folder: Path, name: str, out: Path) -> list[str]:
    """Arguments of the build of one of the contents in `MS`."""
    ms = ",".join(map(str, MS[name]))
    return ["build", str(listed(folder)), *TARGETS, "--name", name, "--m", ms, "--out", str(out), "--json"]


def check(folder: Path) -> str:
    """The name in a bundle that is whole and of one content; fails for anything else."""
    with BundleReader.open(folder) as reader:
        manifest = reader.manifest
        for blob in manifest.blobs:
            reader.read_blob(blob)
    for part in manifest.parts:
        assert [tuple(e.m for e in t.entries) for t in part.tables] == [MS[manifest.name]]
        assert len(part.kernels) == len(MS[manifest.name])
    return manifest.name


def test_eight_builds_of_one_content_make_one_bundle(warm, tmp_path):
    out = tmp_path / "b"
    arguments = [sys.executable, "-c", RUN, *command(tmp_path, "large", out)]
    builds = [
        subprocess.Popen(arguments, env=warm, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    told = []
    for build in builds:
        stdout, stderr = build.communicate(timeout=120)
        assert build.returncode == 0, stderr
        told.append(json.loads(stdout))
    report = verify(out)
    assert (report.version, report.problems, report.orphans, report.leftovers) == (1, (), (), ())
    assert {(t["digest"], t["version"], t["compiled"]) for t in told} == {(report.digest, 1, 0)}
    assert check(out) == "large"


#: Forks builds of two contents in turn and kills each with SIGKILL a moment later; prints how many were killed.
KILLER = """
import json, os, random, signal, sys, time
from gemmcache.cli.app import run
commands, rounds = json.loads(sys.argv[1]), int(sys.argv[2])
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
draw, killed, ended = random.Random(7), 0, 0
def build(turn, wait):
    child = os.fork()
    if child == 0:
        os._exit(run(commands[turn % 2]))
    started = time.monotonic()
    if wait is not None:
        time.sleep(wait)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert status in ((0,) if wait is None else (0, signal.SIGKILL)), status
    return status, time.monotonic() - started
run(commands[0])
# As long as builds take on this machine as it is now, and a little longer.
long = max(build(turn, None)[1] for turn in range(4)) * 1.3
turn = 0
# A busy machine needs more turns to have seen both.
while turn < rounds or (min(killed - 10, ended - 2) < 0 and turn < 10 * rounds):
    status, _ = build(turn, draw.uniform(0.0, long))
    killed += status != 0
    ended += status == 0
    turn += 1
print(killed, ended, file=sys.stderr)
"""


def test_builds_that_are_killed_at_any_moment_leave_a_whole_bundle(warm, tmp_path):
    out = tmp_path / "b"
    commands = [command(tmp_path, name, out) for name in MS]
    assert gemmcache(*commands[0], env=warm).returncode == 0
    arguments = [sys.executable, "-c", KILLER, json.dumps(commands), "40"]
    killer = subprocess.Popen(arguments, env=warm, stderr=subprocess.PIPE, text=True)
    seen = []
    while killer.poll() is None:
        seen.append(check(out))
    _, err = killer.communicate()
    assert killer.returncode == 0, err
    # Some were killed, and some were quick enough to end.
    killed, ended = map(int, err.splitlines()[-1].split())
    assert killed >= 10
    assert ended >= 2
    assert seen
    assert set(seen) <= set(MS)
    check(out)
    # The next build finishes the work, whatever was left.
    for arguments in commands:
        assert gemmcache(*arguments, env=warm).returncode == 0
    report = verify(out)
    assert (report.name, report.problems, report.orphans, report.leftovers) == ("large", (), (), ())


#: Sixteen processes load the bundle over and over while this one publishes two contents in turn.
LOADERS = """
import json, os, sys, time
import torch, tvm_ffi
import gemmcache
from gemmcache.bundle.reader import BundleReader
from gemmcache.cli.app import run
from gemmcache.runtime import loader
folder, commands, ms = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
with BundleReader.open(folder) as reader:
    part = reader.manifest.parts[0]
loader.detect_facts = lambda device=None: loader.part_facts(part)
stop, deadline = folder + ".stop", time.monotonic() + 120
def load():
    seen = set()
    # Until the last version is out, however long a busy machine takes.
    while not os.path.exists(stop) and time.monotonic() < deadline:
        bundle = gemmcache.load(folder)
        (dispatcher,) = bundle.dispatchers.values()
        chosen = {dispatcher.choose(m).function for m in ms[bundle.manifest.name]}
        assert None not in chosen and len(chosen) == len(ms[bundle.manifest.name])
        assert [e.m for e in dispatcher.table.entries] == ms[bundle.manifest.name]
        seen.add(bundle.digest)
        time.sleep(0.02)
    return len(seen)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
children = []
for _ in range(16):
    child = os.fork()
    if child == 0:
        try:
            os._exit(min(load(), 100))
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(101)
    children.append(child)
turns = 12
for turn in range(turns):
    assert run(commands[(turn + 1) % 2]) == 0
    time.sleep(0.1)
open(stop, "w").close()
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print(turns, *codes, file=sys.stderr)
"""


def test_sixteen_loaders_see_one_version_each_while_another_is_published(warm, tmp_path):
    out = tmp_path / "b"
    commands = [command(tmp_path, name, out) for name in MS]
    assert gemmcache(*commands[0], env=warm).returncode == 0
    done = python(LOADERS, out, json.dumps(commands), json.dumps(MS), env=warm)
    assert done.returncode == 0, done.stderr
    _, *codes = map(int, done.stderr.splitlines()[-1].split())
    assert len(codes) == 16
    assert max(codes) <= 100, done.stderr
    assert min(codes) >= 1
    assert max(codes) > 1, "no loader saw a second version"


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.05)
    return False


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _heed_interrupts() -> None:
    """What a shell starts in the background inherits that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class SlowBuild:
    """A build with an empty object cache, one compiler process, and kernels that take `seconds` each.

    Leaving the block ends it, and whatever processes of it are left.
    """

    def __init__(self, warm: dict[str, str], folder: Path, seconds: float) -> None:
        self.log, self.out, self._folder = folder / "log", folder / "b", folder
        self._env = {**warm, "GEMMCACHE_CACHE_DIR": str(folder / "cold"), "TOY_LOG": str(self.log)}
        self._env["TOY_SECONDS"] = str(seconds)

    def __enter__(self) -> SlowBuild:
        arguments = [sys.executable, "-c", RUN, *command(self._folder, "large", self.out), "--jobs", "1"]
        # Files, not pipes: a process that is left would keep a pipe open.
        with (self._folder / "stderr").open("w") as stderr:
            self.process = subprocess.Popen(
                arguments, env=self._env, stdout=subprocess.DEVNULL, stderr=stderr, preexec_fn=_heed_interrupts
            )
        assert wait_for(lambda: self.log.exists() and self.log.read_text().endswith("\n"))
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pid in filter(is_alive, self.workers):
            os.kill(pid, signal.SIGKILL)

    @property
    def workers(self) -> set[int]:
        return {int(line.split()[1]) for line in self.log.read_text().splitlines()}

    @property
    def stderr(self) -> str:
        return (self._folder / "stderr").read_text()


def test_a_killed_build_takes_its_compiler_processes_along(warm, tmp_path):
    with SlowBuild(warm, tmp_path, seconds=60) as build:
        (worker,) = build.workers
        assert is_alive(worker)
        build.process.kill()
        build.process.wait()
        assert wait_for(lambda: not is_alive(worker), 10), "the compiler process outlives its build"
        assert not build.out.exists()


def test_an_interrupted_build_ends_soon_keeps_what_it_compiled_and_publishes_nothing(warm, tmp_path):
    with SlowBuild(warm, tmp_path, seconds=0.5) as build:
        build.process.send_signal(signal.SIGINT)
        assert build.process.wait(60) == 130, build.stderr
        assert "interrupted" in build.stderr
        # Eight kernels were asked for; those under way and next in the queue are finished, no more.
        assert len(build.log.read_text().splitlines()) <= 4
        assert not build.out.exists()


def test_kills_while_objects_are_cached_never_poison_the_cache(warm, tmp_path):
    """Writers of one object cache that are killed while they write, and readers that get all of an object or none."""
    code = """
import hashlib, os, sys
from pathlib import Path
from gemmcache.build.objects import ObjectCache
cache, digests = ObjectCache(Path(sys.argv[1])), [hashlib.sha256(bytes([i])).hexdigest() for i in range(4)]
def content(digest):
    return digest.encode() * 20_000
print("ready", flush=True)
while True:
    for digest in digests:
        found = cache.get(digest)
        if found not in (None, content(digest)):
            os._exit(9)
        cache.put(digest, content(digest))
"""
    draw = random.Random(3)
    for _ in range(3):
        writers = [
            subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=warm, stdout=subprocess.PIPE, text=True)
            for _ in range(4)
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            time.sleep(draw.uniform(0.0, 0.1))
            writer.kill()
        for writer in writers:
            writer.communicate()
            assert writer.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path)
