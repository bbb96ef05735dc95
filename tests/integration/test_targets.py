"""One bundle for four targets of four arches, with the real compiler: its manifest field by field, and whose part
serves which GPU. Whether an entry has a kernel follows from what the kernel families say that they support."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

import gemmcache
from gemmcache import codec
from gemmcache._version import __version__
from gemmcache.build.predict import cheapest
from gemmcache.bundle import elf
from gemmcache.bundle.interface import KERNEL, LIBRARY, PREDICTED, TUNED, Manifest, symbol_name
from gemmcache.bundle.verify import verify
from gemmcache.errors import IncompatibleError
from gemmcache.kernels.identity import detect_toolchain, kernel_digest
from gemmcache.kernels.registry import kernel_families
from gemmcache.policy import Facts, Verdict
from gemmcache.problem import ProblemFamily
from gemmcache.records.layers import Records
from gemmcache.runtime import loader
from gemmcache.target import TARGETS, Host, Target, detect_host
from tests.integration.commands import environment, needs_compiler
from tests.integration.commands import gemmcache as command
from tests.integration.conftest import alone
from tests.integration.test_kernels import gpu_arch

pytestmark = [pytest.mark.compile, needs_compiler]

NAMES = ("a100", "h200", "b200", "rtx5090")
#: What the manifest must say of each, in figures of their own.
FIGURES = {
    "a100": ("sm_80", 108, 41943040, 166912, "NVIDIA A100"),
    "h200": ("sm_90a", 132, 62914560, 232448, "NVIDIA H200"),
    "b200": ("sm_100a", 148, 132120576, 232448, "NVIDIA B200"),
    "rtx5090": ("sm_120a", 170, 100663296, 101376, "NVIDIA GeForce RTX 5090"),
}
TUNED_FAMILY = ProblemFamily.of(4096, 4096)
#: (item of the list of problems, its family, ms)
PROBLEMS = (
    ({"n": 4096, "k": 4096, "ms": [16], "count": 3}, TUNED_FAMILY, (16,)),
    ({"n": 256, "k": 128, "ms": [16, 2048]}, ProblemFamily.of(256, 128), (16, 2048)),
    (
        {"n": 256, "k": 128, "epilogue": "bias+relu", "ms": [16]},
        ProblemFamily.of(256, 128, epilogue="bias+relu"),
        (16,),
    ),
    ({"n": 250, "k": 128, "ms": [16]}, ProblemFamily.of(250, 128), (16,)),
)


@pytest.fixture(scope="module")
def told(place, cache):
    """What `build --json` told about the bundle; built once, also where several processes test."""
    path, source = place / "gemmcache-four.json", place / "four.json"
    with alone(place):
        if not path.exists():
            source.write_text(json.dumps([item for item, _, _ in PROBLEMS]))
            options = [word for name in NAMES for word in ("--target", name)]
            env = environment(cache, place / "no-records")
            done = command("build", source, *options, "--out", place / "gemmcache-four", "--json", env=env)
            assert done.returncode == 0, done.stderr
            path.write_text(done.stdout)
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def manifest(told):
    return Manifest.decode((Path(told["bundle"]) / "manifest.msgpack").read_bytes())


@pytest.fixture(scope="module")
def families():
    return kernel_families()


@pytest.fixture(scope="module")
def toolchain(families):
    return detect_toolchain(families.values())


@pytest.fixture
def part(manifest, name):
    return manifest.parts[NAMES.index(name)]


each_target = pytest.mark.parametrize("name", NAMES)


def supported(families, family: ProblemFamily, target: Target) -> bool:
    return any(f.unsupported(family, target) is None for f in families.values())


def test_the_manifest_is_canonical_and_names_itself(told, manifest):
    data = (Path(told["bundle"]) / "manifest.msgpack").read_bytes()
    value = codec.decode(data, floats=True)
    assert hashlib.sha256(data).hexdigest() == told["digest"]
    assert manifest.encode() == data
    assert list(value) == sorted(["format", "major", "minor", "name", "version", "generator", "parts"])
    assert (value["format"], value["major"], value["minor"]) == ("gemmcache-bundle", 1, 0)
    assert (value["name"], value["version"], value["generator"]) == ("four", 1, f"gemmcache {__version__}")
    assert len(value["parts"]) == len(NAMES)
    assert verify(told["bundle"]).problems == ()


@each_target
def test_target_host_and_toolchain(part, name, toolchain):
    target = part.target
    assert (target.arch, target.sm_count, target.l2_bytes, target.smem_bytes, target.product) == FIGURES[name]
    assert target == TARGETS[name]
    assert part.host == detect_host()
    assert part.toolchain == toolchain
    assert {n for n, _ in part.toolchain.kernel_sources} == set(kernel_families())
    assert None not in (toolchain.dsl, toolchain.cuda_major, toolchain.tvm_ffi)


@each_target
def test_tables_hold_every_problem_and_say_where_each_choice_is_from(part, name, families):
    target = TARGETS[name]
    assert {t.family: (t.count, tuple(e.m for e in t.entries)) for t in part.tables} == {
        family: (item.get("count", 1), ms) for item, family, ms in PROBLEMS
    }
    kernels = {k.digest: k.spec for k in part.kernels}
    with Records.open(None, read_only=True) as records:
        found = {(t.family, e.m): records.lookup(t.family.at(e.m), target) for t in part.tables for e in t.entries}
    assert {key for key, record in found.items() if record} == ({(TUNED_FAMILY, 16)} if name == "h200" else set())
    for table in part.tables:
        for entry in table.entries:
            record = found[table.family, entry.m]
            if record is not None:
                assert (entry.origin, entry.record) == (TUNED, record.digest)
                assert entry.library_us == record.library_us
                assert (entry.choice == KERNEL) == (record.winner is not None)
                continue
            assert (entry.origin, entry.record, entry.us, entry.library_us, entry.error) == (
                PREDICTED, None, None, None, None,
            )  # fmt: skip
            if supported(families, table.family, target):
                assert entry.choice == KERNEL
                assert kernels[entry.kernel].config == cheapest(table.family.at(entry.m), target, families)
            else:
                assert (entry.choice, entry.kernel) == (LIBRARY, None)


@each_target
def test_kernels_are_for_the_target_and_named_by_all_that_made_them(part, name, families, toolchain):
    target = TARGETS[name]
    used = {e.kernel: t.family for t in part.tables for e in t.entries if e.kernel}
    assert {k.digest for k in part.kernels} == set(used)
    for kernel in part.kernels:
        spec = kernel.spec
        family = families[spec.config.kernel_family]
        assert family.unsupported(used[kernel.digest], target) is None
        assert spec == family.spec(spec.config, used[kernel.digest], target)
        assert spec.arch == target.arch
        assert spec.sm_count == (target.sm_count if family.bakes_sm_count(spec.config) else None)
        assert kernel.digest == kernel_digest(spec, toolchain, detect_host())
        assert kernel.function == f"gc_{kernel.digest[:32]}"


@each_target
def test_the_blob_is_the_one_named_and_holds_the_kernels_of_the_target(told, part, name):
    if not part.kernels:
        assert part.blob is None
        return
    data = (Path(told["bundle"]) / "blobs" / part.blob.digest).read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (part.blob.size, part.blob.digest)
    functions = {e for e in elf.exports(data) if e.startswith("__tvm_ffi_gc_")}
    assert functions == {symbol_name(k.function) for k in part.kernels}
    major, minor = TARGETS[name].capability
    assert {gpu_arch(image) for image in elf.gpu_images(data)} == {10 * major + minor}


def test_the_blobs_are_those_of_the_parts_and_nothing_else(told, manifest):
    named = {p.blob.digest for p in manifest.parts if p.blob}
    assert {p.name for p in (Path(told["bundle"]) / "blobs").iterdir()} == named
    assert len(named) == sum(bool(p.kernels) for p in manifest.parts)
    assert told["blob_bytes"] == sum(p.blob.size for p in manifest.parts if p.blob)
    # Three arches have kernels whatever is installed beside the operators.
    assert all(manifest.parts[NAMES.index(name)].blob for name in ("a100", "h200", "b200"))


@each_target
def test_the_provenance_is_that_of_the_records(part, name):
    with Records.open(None, read_only=True) as records:
        record = records.lookup(TUNED_FAMILY.at(16), TARGETS[name])
    if name == "h200":
        environment = record.environment
        assert (part.driver, part.cuda_runtime) == (environment.driver, environment.cuda_runtime)
        assert environment.target.key == part.target.key
    else:
        assert record is part.driver is part.cuda_runtime is None


def test_what_build_told_is_what_the_manifest_holds(told, manifest):
    for summary, part in zip(told["targets"], manifest.parts, strict=True):
        entries = [e for t in part.tables for e in t.entries]
        assert summary["target"] == part.target.to_value()
        assert summary["entries"] == len(entries) == sum(len(ms) for _, _, ms in PROBLEMS)
        assert summary["unique_kernels"] == len(part.kernels)
        assert summary["kernel_entries"] == sum(e.choice == KERNEL for e in entries)
        assert summary["library_entries"] == sum(e.choice == LIBRARY for e in entries)
        assert summary["predicted_entries"] == sum(e.origin == PREDICTED for e in entries)
    # Kernels of different arches are different kernels.
    assert told["compiled"] + told["cached"] == sum(len(p.kernels) for p in manifest.parts)


def facts_of(target: Target, toolchain, **changes) -> Facts:
    facts = Facts.of_target(target, host=detect_host(), tvm_ffi=toolchain.tvm_ffi, driver="599.1", cuda_runtime="13.9")
    return replace(facts, **changes)


@each_target
def test_each_gpu_gets_its_own_part(manifest, part, name, toolchain):
    chosen, judgement = loader.choose_part(manifest.parts, facts_of(TARGETS[name], toolchain))
    assert chosen is part
    # The driver is another than the records', or nobody's.
    assert {d.field for d in judgement.differences} == {"driver", "cuda_runtime"}
    same = facts_of(TARGETS[name], toolchain, driver=part.driver, cuda_runtime=part.cuda_runtime)
    chosen, judgement = loader.choose_part(manifest.parts, same)
    assert chosen is part
    assert judgement.verdict is (Verdict.STALE if part.driver is None else Verdict.OK)


@pytest.mark.parametrize(
    ("product", "arch", "sm_count", "name", "fields"),
    [
        ("NVIDIA H100", "sm_90a", 132, "h200", {"product"}),
        ("NVIDIA H20", "sm_90a", 78, "h200", {"product", "sm_count"}),
        ("NVIDIA GeForce RTX 5090 D", "sm_120a", 170, "rtx5090", {"product"}),
        ("NVIDIA RTX PRO 6000 Blackwell", "sm_120a", 188, "rtx5090", {"product", "sm_count"}),
    ],
)
def test_another_product_of_an_arch_gets_that_part_as_stale(manifest, toolchain, product, arch, sm_count, name, fields):
    facts = facts_of(Target(arch, sm_count, 0, 0, product), toolchain)
    chosen, judgement = loader.choose_part(manifest.parts, facts)
    assert chosen.target == TARGETS[name]
    assert judgement.verdict is Verdict.STALE
    assert {d.field for d in judgement.differences} == {"driver", "cuda_runtime", *fields}


@pytest.mark.parametrize("arch", ["sm_86", "sm_90", "sm_103a", "sm_121a"])
def test_a_gpu_of_no_part_is_refused_and_all_parts_are_named(manifest, toolchain, arch):
    facts = facts_of(Target(arch, 132, 0, 0, "NVIDIA Something"), toolchain)
    with pytest.raises(IncompatibleError) as refused:
        loader.choose_part(manifest.parts, facts)
    assert all(str(TARGETS[name]) in refused.value.message for name in NAMES)
    assert arch in refused.value.message


def test_a_cpu_of_another_machine_is_refused_for_every_part(manifest, toolchain):
    for name in NAMES:
        facts = facts_of(TARGETS[name], toolchain, host=Host("riscv64", "riscv64"))
        with pytest.raises(IncompatibleError, match="riscv64"):
            loader.choose_part(manifest.parts, facts)


@each_target
def test_load_serves_the_part_of_the_gpu_that_it_finds(told, part, name, toolchain, monkeypatch):
    monkeypatch.setattr(loader, "detect_facts", lambda device=None: facts_of(TARGETS[name], toolchain))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", loader.StaleBundleWarning)
        loaded = gemmcache.load(told["bundle"])
    assert loaded.part == part
    kernels = {k.digest for k in part.kernels}
    entries = [(d, e) for d in loaded.dispatchers.values() for e in d.table.entries]
    assert {e.kernel for d, e in entries if d.choose(e.m).function is not None} == kernels
