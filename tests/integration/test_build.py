"""`gemmcache build` with the real compiler, from the shipped records."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gemmcache.bundle.interface import KERNEL, PREDICTED, TUNED
from gemmcache.bundle.reader import BundleReader
from gemmcache.bundle.verify import verify
from gemmcache.cli.app import run
from tests.integration.commands import environment, gemmcache, install_toy, needs_compiler, python
from tests.integration.conftest import LLAMA, three_source

pytestmark = [pytest.mark.compile, needs_compiler]

#: Makes every way to the compiler fail.
NO_COMPILER = """
import sys
for name in ("cutlass", "cutlass.cute", "multiprocessing.forkserver"):
    sys.modules[name] = None
from gemmcache.build import compile
compile._pool = compile.compile_one = None
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def tiles(log: Path) -> list[int]:
    """The tiles of the toy kernels that were compiled."""
    return [int(line.split()[0]) for line in log.read_text().splitlines()]


def build_llama(folder: Path, *more: str) -> int:
    return run(["build", str(LLAMA), "--fuse", "--target", "h200", "--out", str(folder), *more])


def problems(tmp_path: Path, *items: dict[str, object]) -> Path:
    path = tmp_path / "problems.json"
    path.write_text(json.dumps(items))
    return path


def test_every_problem_of_the_model_is_tuned_and_the_bundle_verifies(llama, capsys):
    (told,) = llama["targets"]
    assert told["target"]["product"] == "NVIDIA H200"
    assert told["entries"] == 5 * 18
    assert told["predicted_entries"] == 0
    assert told["kernel_entries"] + told["library_entries"] == told["entries"]
    assert 0 < told["unique_kernels"] <= told["kernel_entries"]
    assert told["speedup"] >= 1.0
    assert llama["compiled"] + llama["cached"] == told["unique_kernels"]
    report = verify(llama["bundle"])
    assert report.problems == ()
    assert report.digest == llama["digest"]
    assert [b.kernels for b in report.blobs] == [told["unique_kernels"]]
    assert run(["verify", llama["bundle"]]) == 0


def test_inspect_agrees_with_what_build_told(llama, capsys):
    assert run(["inspect", llama["bundle"], "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    (told,) = llama["targets"]
    (part,) = shown["parts"]
    entries = [e for t in part["tables"] for e in t["entries"]]
    assert (shown["digest"], shown["version"], shown["name"]) == (llama["digest"], 1, "llama-3.1-8b")
    assert shown["blob_bytes"] == llama["blob_bytes"]
    assert len(entries) == told["entries"]
    assert sum(e["choice"] == KERNEL for e in entries) == told["kernel_entries"]
    assert {e["origin"] for e in entries} == {TUNED}
    assert len(part["kernels"]) == told["unique_kernels"]
    assert sum(k["entries"] for k in part["kernels"]) == told["kernel_entries"]
    assert {e["kernel"] for e in entries} - {None} == {k["digest"] for k in part["kernels"]}
    # No entry serves a kernel that its own record shows slower than the library.
    assert all(e["us"] < e["library_us"] for e in entries if e["choice"] == KERNEL)
    assert part["driver"]
    assert part["target"] == told["target"]


def test_the_table_has_a_row_a_family_and_the_totals(llama, tmp_path, capsys):
    assert build_llama(tmp_path / "b") == 0
    out = capsys.readouterr().out
    (told,) = llama["targets"]
    for family in ("4096x4096", "4096x14336", "6144x4096", "28672x4096", "128256x4096"):
        (line,) = (line for line in out.splitlines() if line.startswith(family + " "))
        assert line.split()[2:5] == ["1" if family.startswith("128256") else "32", "1..8192", "18"]
    assert f"{told['entries']} entries: {told['kernel_entries']} served by {told['unique_kernels']} unique" in out
    assert f"{told['library_entries']} by the library; 0 predicted" in out
    assert f"0 compiled, {told['unique_kernels']} from the object cache" in out
    assert f"sha256 {llama['digest']}" in out


def test_require_tuned_is_a_finding_and_nothing_is_written(llama, tmp_path, capsys):
    out = tmp_path / "b"
    assert run(["build", str(LLAMA), "--fuse", "--target", "b200", "--require-tuned", "--out", str(out), "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["error"] == "MissingRecordError"
    assert "NVIDIA B200" in captured.err
    assert not out.exists()
    assert build_llama(out, "--require-tuned") == 0


def test_one_bundle_for_three_targets_marks_what_is_predicted(three_targets):
    with BundleReader.open(three_targets["bundle"]) as reader:
        parts = {p.target.arch: p for p in reader.manifest.parts}
    assert list(parts) == ["sm_90a", "sm_100a", "sm_80"]
    told = {t["target"]["arch"]: t for t in three_targets["targets"]}
    for arch, part in parts.items():
        entries = [e for t in part.tables for e in t.entries]
        origins = {t.family.n: e.origin for t in part.tables for e in t.entries}
        assert origins == {4096: TUNED if arch == "sm_90a" else PREDICTED, 256: PREDICTED}
        assert {k.spec.arch for k in part.kernels} == {arch}
        assert told[arch]["entries"] == len(entries) == 2
        assert told[arch]["predicted_entries"] == sum(e.origin == PREDICTED for e in entries)
        assert all(e.us is e.library_us is e.record is None for e in entries if e.origin == PREDICTED)
    assert len({p.blob for p in parts.values()}) == 3
    assert parts["sm_90a"].driver
    assert parts["sm_100a"].driver is None
    assert verify(three_targets["bundle"]).ok


def test_a_target_named_twice_is_a_usage_error(tmp_path):
    assert build_llama(tmp_path / "b", "--target", "h200") == 2
    assert run(["build", str(LLAMA), "--target", "h201", "--out", str(tmp_path / "b")]) == 2


def test_builds_in_two_folders_are_equal(llama, tmp_path):
    assert build_llama(tmp_path / "one") == 0
    assert build_llama(tmp_path / "deep" / "er" / "two") == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "deep" / "er" / "two") == contents(Path(llama["bundle"]))


def test_everything_compiled_anew_in_other_processes_gives_the_same_bytes(tmp_path):
    """Hash seed, working folder, cache and temporary folder differ; nothing is taken from a cache."""
    source = problems(tmp_path, {"n": 256, "k": 128, "ms": [1, 64]}, {"n": 512, "k": 256, "dtype": "fp16", "ms": [16]})
    started = []
    for i, seed in enumerate(("1", "4242")):
        here = tmp_path / f"here{i}"
        # The second is too long for a socket in it, which multiprocessing would like to make.
        temporary = here / ("t" * 120 * i or "t")
        temporary.mkdir(parents=True)
        env = environment(here / "cache", here / "records", PYTHONHASHSEED=seed, TMPDIR=str(temporary))
        command = [sys.executable, "-m", "gemmcache", "build", str(source), "--target", "h200", "--out", "b", "--json"]
        started.append(
            subprocess.Popen(command, env=env, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    for process in started:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        told = json.loads(out)
        assert told["cached"] == 0
        assert told["compiled"] >= 2
    assert contents(tmp_path / "here0" / "b") == contents(tmp_path / "here1" / "b")


def test_a_rebuild_keeps_the_version_until_something_changes(llama, tmp_path):
    folder = tmp_path / "b"
    assert build_llama(folder) == 0
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    assert build_llama(folder) == 0
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()} == before
    assert verify(folder).version == 1
    assert build_llama(folder, "--m", "1..4096") == 0
    report = verify(folder)
    assert (report.version, report.problems, report.orphans) == (2, (), ())
    assert build_llama(folder) == 0
    assert verify(folder).version == 3


def test_a_warm_build_does_not_even_import_the_compiler(llama, cache, tmp_path):
    env = environment(cache, tmp_path / "records")
    arguments = ("build", LLAMA, "--fuse", "--target", "h200", "--out", tmp_path / "b", "--json")
    done = gemmcache(*arguments, env=env, before=NO_COMPILER)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["compiled"], told["digest"]) == (0, llama["digest"])
    # The poison works: with an empty cache the same build can't be done.
    listed = ("build", three_source(tmp_path), "--target", "a100", "--out", tmp_path / "b")
    cold = gemmcache(*listed, env={**env, "GEMMCACHE_CACHE_DIR": str(tmp_path / "cold")}, before=NO_COMPILER)
    assert "'NoneType' object is not callable" in cold.stderr


def test_damaged_cache_entries_are_compiled_again_and_healed(three_targets, cache, tmp_path, monkeypatch, capsys):
    objects = sorted((cache / "objects").glob("*.o"))
    own = tmp_path / "cache" / "objects"
    own.mkdir(parents=True)
    with BundleReader.open(three_targets["bundle"]) as reader:
        (part,) = (p for p in reader.manifest.parts if p.target.arch == "sm_80")
    needed = {k.digest for k in part.kernels}
    for path in objects:
        if path.stem in needed:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            (own / path.name).write_bytes(bytes(data))
    monkeypatch.setenv("GEMMCACHE_CACHE_DIR", str(own.parent))
    arguments = ["build", str(three_source(tmp_path)), "--target", "a100", "--json"]
    for compiled in (len(needed), 0):
        assert run([*arguments, "--out", str(tmp_path / "b")]) == 0
        assert json.loads(capsys.readouterr().out)["compiled"] == compiled
    with BundleReader.open(tmp_path / "b") as reader:
        assert reader.manifest.parts[0].blob == part.blob


@pytest.mark.parametrize("where", ["/dev/null/cache", "/proc/cache"])
def test_a_cache_that_can_not_be_written_costs_nothing_but_time(three_targets, tmp_path, monkeypatch, capsys, where):
    monkeypatch.setenv("GEMMCACHE_CACHE_DIR", where)
    arguments = ["build", str(three_source(tmp_path)), "--target", "a100", "--json"]
    assert run([*arguments, "--out", str(tmp_path / "b")]) == 0
    assert json.loads(capsys.readouterr().out)["cached"] == 0
    assert verify(tmp_path / "b").ok


@pytest.fixture
def toy_source(tmp_path: Path) -> Path:
    return problems(tmp_path, {"n": 256, "k": 128, "dtype": "fp32", "ms": [16, 32, 64, 128]})


def test_an_out_of_tree_kernel_family_is_found_by_its_entry_point(toy, toy_source, tmp_path):
    log = tmp_path / "log"
    env = environment(tmp_path / "cache", tmp_path / "records", toy, TOY_LOG=str(log))
    arguments = ("build", toy_source, "--target", "h200", "--out", tmp_path / "b", "--json")
    done = gemmcache(*arguments, env=env)
    assert done.returncode == 0, done.stderr
    (told,) = json.loads(done.stdout)["targets"]
    assert (told["unique_kernels"], told["predicted_entries"], told["library_entries"]) == (4, 4, 0)
    assert sorted(tiles(log)) == [16, 32, 64, 128]
    report = verify(tmp_path / "b")
    assert report.problems == ()
    with BundleReader.open(tmp_path / "b") as reader:
        assert {k.spec.config.kernel_family for k in reader.manifest.parts[0].kernels} == {"toy"}
        assert dict(reader.manifest.parts[0].toolchain.kernel_sources).keys() >= {"operators", "toy"}
    # Its sources are part of the key: other sources, other kernels.
    changed = install_toy(tmp_path / "changed")
    with (changed / "toy_kernels.py").open("a") as file:
        file.write("# another version\n")
    again = gemmcache(*arguments, env={**env, "PYTHONPATH": env["PYTHONPATH"].replace(str(toy), str(changed))})
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["compiled"] == 4
    # Without the family the library serves what it served.
    gone = gemmcache(*arguments, env=environment(tmp_path / "cache", tmp_path / "records"))
    assert gone.returncode == 0, gone.stderr
    assert json.loads(gone.stdout)["targets"][0]["library_entries"] == 4


def test_a_kernel_that_kills_its_compiler_is_named_and_the_old_bundle_stays(toy, toy_source, tmp_path):
    folder = tmp_path / "b"
    env = environment(tmp_path / "cache", tmp_path / "records", toy)
    first = gemmcache("build", toy_source, "--m", "16", "--target", "h200", "--out", folder, env=env)
    assert first.returncode == 0, first.stderr
    before = contents(folder)
    faults = {"TOY_TILE_32": "abort", "TOY_TILE_64": "exit", "TOY_LOG": str(tmp_path / "log")}
    done = gemmcache("build", toy_source, "--target", "h200", "--out", folder, env={**env, **faults})
    assert done.returncode == 5
    assert "2 of 4 kernels did not compile" in done.stderr
    assert "toy[tile=32]" in done.stderr or "toy[tile=64]" in done.stderr
    assert "the compiler process died" in done.stderr
    assert contents(folder) == before
    # What did compile is in the cache: the repaired build only compiles the rest.
    (tmp_path / "log").unlink()
    repaired = {**env, "TOY_LOG": str(tmp_path / "log")}
    fixed = gemmcache("build", toy_source, "--target", "h200", "--out", folder, "--json", env=repaired)
    assert fixed.returncode == 0, fixed.stderr
    assert sorted(tiles(tmp_path / "log")) == [32, 64]
    assert json.loads(fixed.stdout)["version"] == 2


def test_a_kernel_that_does_not_compile_is_named_whatever_its_family_raises(toy, toy_source, tmp_path):
    """All kinds of failure in one build, each with its own kernel; asked of the compile step itself."""
    code = """
import json, sys
from pathlib import Path
from gemmcache.build.compile import compile_kernels
from gemmcache.build.objects import ObjectCache
from gemmcache.kernels.identity import detect_toolchain, kernel_digest
from gemmcache.kernels.registry import kernel_families
from gemmcache.problem import ProblemFamily
from gemmcache.target import TARGETS, detect_host
families = kernel_families()
toolchain, host = detect_toolchain(families.values()), detect_host()
toy, problem, target = families["toy"], ProblemFamily.of(256, 128, "float32"), TARGETS["h200"]
specs = [toy.spec(c, problem, target) for c in toy.configs(problem, target)]
digests = {kernel_digest(s, toolchain, host): s for s in specs}
objects, errors = compile_kernels(digests, ObjectCache(Path(sys.argv[1])), jobs=2)
print(json.dumps({str(digests[d].config): [type(e).__name__, e.message] for d, e in errors.items()}))
assert not objects
"""
    kinds = {"16": "raise", "32": "unpicklable", "64": "wrong-name", "128": "nothing"}
    faults = {f"TOY_TILE_{tile}": kind for tile, kind in kinds.items()}
    env = environment(tmp_path / "cache", tmp_path / "records", toy, **faults)
    done = python(code, tmp_path / "objects", env=env)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    said = {16: "no such thing", 32: "holds a lock", 64: "does not export", 128: "does not export"}
    for tile, text in said.items():
        kind, message = errors[f"toy[tile={tile}]"]
        assert kind == "CompileError"
        assert f"toy[tile={tile}] for sm_90a" in message
        assert text in message
    assert not list((tmp_path / "objects").glob("*.o"))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("toy = toy_kernels:Nothing", "toy_kernels:Nothing"),
        ("toy = absent_module:Family", "absent_module"),
        ("toy = toy_kernels:TILES", "not a class"),
        ("other = toy_kernels:ToyFamily", "its name is 'toy'"),
        ("toy = broken_module:Family", "division by zero"),
        ("toy = gemmcache.kernels.interface:KernelFamily", "abstract"),
    ],
)
def test_a_broken_plug_in_is_named(toy_source, tmp_path, line, text):
    site = install_toy(tmp_path / "site", line)
    (site / "broken_module.py").write_text("1 / 0\n")
    env = environment(tmp_path / "cache", tmp_path / "records", site)
    done = gemmcache("build", toy_source, "--target", "h200", "--out", tmp_path / "b", env=env)
    assert done.returncode == 2
    assert f"kernel family '{line.split()[0]}'" in done.stderr
    assert text in done.stderr
    assert not (tmp_path / "b").exists()


def test_two_plug_ins_of_one_name_are_refused(toy_source, tmp_path):
    one = install_toy(tmp_path / "one")
    two = install_toy(tmp_path / "two", "toy = elsewhere:Family")
    (two / "toy_kernels-1.0.dist-info").rename(two / "elsewhere-1.0.dist-info")
    (two / "elsewhere-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    env = environment(tmp_path / "cache", tmp_path / "records", one, two)
    done = gemmcache("build", toy_source, "--target", "h200", "--out", tmp_path / "b", env=env)
    assert done.returncode == 2
    assert "is both" in done.stderr


def test_build_needs_no_home(llama, cache, tmp_path):
    env = {k: v for k, v in environment(cache, tmp_path / "records").items() if k != "HOME"}
    done = gemmcache("build", LLAMA, "--fuse", "--target", "h200", "--out", tmp_path / "b", "--json", env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["digest"] == llama["digest"]
