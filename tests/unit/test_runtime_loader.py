"""Loading: the verdict before any code is loaded, the runtime library's package, strictness."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from importlib import metadata

import pytest

import gemmcache
from gemmcache.bundle.interface import (
    LIBRARY,
    PREDICTED,
    DispatchTable,
    Entry,
    Manifest,
    Part,
    hinted_cuda_major,
)
from gemmcache.bundle.writer import publish
from gemmcache.errors import (
    DeviceError,
    IncompatibleError,
    IntegrityError,
    MissingPackageError,
    StaleError,
    UsageError,
)
from gemmcache.policy import Facts
from gemmcache.problem import ProblemFamily
from gemmcache.runtime import loader, native
from gemmcache.target import TARGETS, Host
from tests.fakes import TOOLCHAIN

HOST = Host("x86_64", "x86-64-v3")
PART = Part(
    TARGETS["h200"],
    HOST,
    TOOLCHAIN,
    "580.1",
    "13.0",
    None,
    (),
    (DispatchTable(ProblemFamily.of(64, 64), (Entry(1, LIBRARY, PREDICTED),)),),
)
HERE = loader.part_facts(PART)


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    monkeypatch.delenv("GEMMCACHE_STRICT", raising=False)

    def published(*parts):
        folder = tmp_path / "bundle"
        publish(folder, Manifest("b", 1, "gemmcache test", parts or (PART,)), {})
        return folder

    return published


@pytest.fixture
def here(monkeypatch):
    def facts(**changes):
        monkeypatch.setattr(loader, "detect_facts", lambda device=None: replace(HERE, **changes))

    facts()
    return facts


def test_without_a_gpu_load_says_so(bundle, monkeypatch):
    monkeypatch.setattr(loader.torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="CUDA device"):
        gemmcache.load(bundle())


def test_a_matching_bundle_loads_without_a_warning(bundle, here):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = gemmcache.load(bundle())
    assert loaded.judgement.differences == ()
    assert loaded.counters["calls"] == 0


@pytest.mark.parametrize("arch", ["sm_90", "sm_100a", "sm_80"])
def test_another_arch_is_refused_and_both_sides_are_named(bundle, here, monkeypatch, arch):
    monkeypatch.setattr(loader, "load_module", lambda *_: pytest.fail("code was loaded"))
    here(arch=arch)
    with pytest.raises(IncompatibleError, match=f"sm_90a.*{arch}"):
        gemmcache.load(bundle())


def test_a_lesser_cpu_is_refused(bundle, here):
    here(host=Host("x86_64", "x86-64-v2"))
    with pytest.raises(IncompatibleError, match="x86-64-v3"):
        gemmcache.load(bundle())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"driver": "590.1"}, "driver"),
        ({"driver": None}, "driver"),
        ({"cuda_runtime": "13.1"}, "cuda_runtime"),
        ({"sm_count": 78}, "sm_count"),
        ({"product": "NVIDIA H20"}, "product"),
    ],
)
def test_a_stale_bundle_is_served_with_one_warning_or_refused(bundle, here, monkeypatch, change, field):
    here(**change)
    folder = bundle()
    with pytest.warns(loader.StaleBundleWarning, match=field) as caught:
        loaded = gemmcache.load(folder)
    assert len(caught) == 1
    assert [d.field for d in loaded.judgement.differences] == [field]
    with pytest.raises(StaleError, match=field):
        gemmcache.load(folder, on_stale="raise")
    monkeypatch.setenv("GEMMCACHE_STRICT", "1")
    with pytest.raises(StaleError):
        gemmcache.load(folder)


def test_the_part_that_fits_best_is_chosen(bundle, here):
    h100 = replace(PART, target=TARGETS["h100"])
    b200 = replace(PART, target=TARGETS["b200"])
    loaded = gemmcache.load(bundle(b200, h100, PART))
    assert loaded.part.target == TARGETS["h200"]
    here(arch="sm_100a", product="NVIDIA B200", sm_count=148)
    assert gemmcache.load(bundle(b200, h100, PART)).part.target == TARGETS["b200"]


@pytest.mark.parametrize("options", [{"on_miss": "ignore"}, {"on_stale": "ignore"}])
def test_unknown_options_are_usage_errors(bundle, here, options):
    with pytest.raises(UsageError):
        gemmcache.load(bundle(), **options)


def test_a_folder_that_is_no_bundle(tmp_path, here):
    with pytest.raises(UsageError, match="bundle"):
        gemmcache.load(tmp_path)


def test_a_damaged_manifest_is_an_integrity_error(bundle, here):
    folder = bundle()
    manifest = folder / "manifest.msgpack"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    with pytest.raises(IntegrityError):
        gemmcache.load(folder)


def test_a_missing_runtime_library_names_the_package(monkeypatch):
    def none(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(native, "_usual_path", lambda major: None)
    monkeypatch.setattr(native.metadata, "files", none)
    monkeypatch.setattr(native.metadata, "version", none)
    with pytest.raises(MissingPackageError, match="pip install nvidia-cutlass-dsl-libs-cu13") as caught:
        native.find_runtime_library(13)
    assert isinstance(caught.value, ImportError)


def test_a_runtime_library_of_another_cuda_major_is_named_too(monkeypatch):
    monkeypatch.setattr(native, "_usual_path", lambda major: None)
    monkeypatch.setattr(native.metadata, "files", lambda name: [])
    monkeypatch.setattr(native, "_installed", lambda package: package.endswith("cu12"))
    with pytest.raises(MissingPackageError, match=r"libs-cu12.*pip install nvidia-cutlass-dsl-libs-cu13"):
        native.find_runtime_library(13)


@pytest.mark.parametrize(
    ("manifest", "major"),
    [
        (Manifest("x", 1, "t", (PART,)).encode(), TOOLCHAIN.cuda_major),
        (b"\xaacuda_major\x0d..\xaacuda_major\x0d", 13),
        (b"\xaacuda_major\x0c..\xaacuda_major\x0d", None),
        (b"\xaacuda_major\xc0", None),
        (b"cuda_major\x0d", None),
        (b"\xaacuda_major", None),
    ],
)
def test_the_cuda_major_is_guessed_only_where_one_is_meant(manifest, major):
    assert hinted_cuda_major(manifest) == major


@pytest.mark.parametrize("how", ["there", "not there", "broken", "no threads"])
def test_preloading_decides_nothing_and_never_fails(monkeypatch, tmp_path, how):
    monkeypatch.setattr(native, "_loaded", {})
    path = native.find_runtime_library(13)
    if how == "broken":
        path = tmp_path / "broken.so"
        path.write_bytes(b"no library")
    monkeypatch.setattr(native, "_usual_path", lambda major: None if how == "not there" else path)
    if how == "not there":
        monkeypatch.setattr(native.metadata, "files", lambda package: None)
    if how == "no threads":

        def refuse(self):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
    before = threading.active_count()
    with native.preloading() as preload:
        preload(None)
        preload(13)
    assert threading.active_count() == before
    assert native._loaded == {}


def test_a_bundle_whose_runtime_library_is_missing_is_told_by_the_real_loading(monkeypatch):
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "_installed", lambda package: False)
    monkeypatch.setattr(native, "_usual_path", lambda major: None)
    monkeypatch.setattr(native.metadata, "files", lambda package: None)
    with native.preloading() as preload:
        preload(13)
    with pytest.raises(MissingPackageError, match="cu13"):
        native.load_runtime_library(13)


def test_the_installed_runtime_library_is_found(monkeypatch):
    at_once = native.find_runtime_library(13)
    assert at_once.name == "libcute_dsl_runtime.so"
    monkeypatch.setattr(native, "_usual_path", lambda major: None)
    assert native.find_runtime_library(13).samefile(at_once)


def test_facts_of_a_part_cover_every_rule():
    assert all(getattr(HERE, field) is not None for field in Facts.__dataclass_fields__)


def test_the_loader_works_where_compiler_tuner_and_command_line_cannot_be_imported(tmp_path, bundle):
    folder = bundle()
    code = f"""
import sys
for name in ("cutlass", "diskcache", "click", "rich", "transformers", "yaml"):
    sys.modules[name] = None
import gemmcache
from gemmcache.runtime import loader
from gemmcache.errors import DeviceError
facts = loader.part_facts
from gemmcache.bundle.reader import BundleReader
with BundleReader.open({str(folder)!r}) as reader:
    part = reader.manifest.parts[0]
loader.detect_facts = lambda device=None: facts(part)
bundle = gemmcache.load({str(folder)!r})
import torch
x, w = torch.randn(3, 64), torch.randn(64, 64)
assert torch.equal(bundle.linear(x, w), torch.nn.functional.linear(x, w))
bad = [n for n in sys.modules if n.startswith(("gemmcache.build", "gemmcache.tuning", "gemmcache.cli"))]
assert not bad, bad
"""
    env = {k: v for k, v in os.environ.items() if k not in ("HOME", "GEMMCACHE_STRICT")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_marked_and_unharmed(bundle, here):
    loaded = gemmcache.load(bundle())
    child = os.fork()
    if child == 0:
        os._exit(0 if loaded._linear.forked else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not loaded._linear.forked
