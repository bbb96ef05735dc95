"""Hostile and damaged bundles through `gemmcache.load`: a typed error before anything of theirs runs."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from pathlib import Path

import pytest

import gemmcache
from gemmcache.bundle import memory
from gemmcache.bundle.interface import Blob, Manifest
from gemmcache.bundle.reader import BundleReader
from gemmcache.bundle.writer import publish
from gemmcache.errors import GemmcacheError, IncompatibleError, IntegrityError, ToolError
from gemmcache.runtime import loader
from tests.strategies_bundle import bundle, digest_of, shared_object


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """The file that code of the bundle creates once it runs."""
    return tmp_path / "it-ran"


@pytest.fixture
def folder(tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle whose shared objects run code as they are loaded, on the machine that it was made for."""
    manifest = armed(tmp_path / "b", marker)
    part = manifest.parts[0]
    monkeypatch.delenv("GEMMCACHE_STRICT", raising=False)
    monkeypatch.setattr(loader, "detect_facts", lambda device=None: loader.part_facts(part))
    return tmp_path / "b"


def armed(folder: Path, marker: Path, drop: int = 0) -> Manifest:
    """Publishes a bundle with a constructor in each blob that makes `marker`, and without `drop` of its functions."""
    manifest, _ = bundle(1, real=False)
    constructor = f"""
        extern int creat(const char *, unsigned);
        __attribute__((constructor)) static void run(void) {{ creat("{marker}", 0600); }}
    """
    parts, blobs = [], {}
    for part in manifest.parts:
        symbols = tuple(k.symbol for k in part.kernels)
        data = shared_object(symbols[drop:], constructor)
        blobs[digest_of(data)] = data
        parts.append(replace(part, blob=Blob(digest_of(data), len(data))))
    made = replace(manifest, parts=tuple(parts))
    publish(folder, made, blobs)
    return made


def blob_path(folder: Path) -> Path:
    with BundleReader.open(folder) as reader:
        return folder / "blobs" / reader.manifest.parts[0].blob.digest


def refused(folder: Path, marker: Path, kind: type[GemmcacheError] = IntegrityError, match: str | None = None) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(kind, match=match):
        gemmcache.load(folder)
    assert not marker.exists(), "code of the bundle ran"
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_trap_works(folder, marker):
    gemmcache.load(folder)
    assert marker.exists()


def test_a_manifest_truncated_anywhere_loads_nothing(folder, marker):
    path = folder / "manifest.msgpack"
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        refused(folder, marker)


def test_a_manifest_with_a_byte_changed_loads_nothing_or_what_it_names(folder, marker, monkeypatch):
    """Whatever the byte is of, code runs only if it is of a blob that the manifest names by digest."""
    path = folder / "manifest.msgpack"
    whole = path.read_bytes()

    def note(digest, open_copy, cuda_major):
        # Only bytes of that very digest can be had.
        os.close(open_copy())
        raise ToolError("stopped here")

    monkeypatch.setattr(loader, "load_module", note)
    monkeypatch.setattr(loader.warnings, "warn", lambda *_, **__: None)
    outcomes: set[type] = set()
    for i in range(0, len(whole), 3):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        with pytest.raises(GemmcacheError) as caught:
            gemmcache.load(folder)
        outcomes.add(type(caught.value))
    assert {IntegrityError, IncompatibleError} <= outcomes
    assert not marker.exists()


@pytest.mark.parametrize("where", [0, 0.25, 0.5, 0.999])
def test_a_blob_with_a_byte_changed_is_never_loaded(folder, marker, where):
    path = blob_path(folder)
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 1
    path.write_bytes(bytes(data))
    refused(folder, marker, match="bytes that its name stands for")


def test_swapped_blobs_are_never_loaded(folder, marker):
    one, two = sorted((folder / "blobs").iterdir())
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)
    refused(folder, marker)


def test_a_blob_that_is_a_link_to_a_library_is_never_loaded(folder, marker, tmp_path):
    path = blob_path(folder)
    path.rename(tmp_path / "elsewhere.so")
    path.symlink_to(tmp_path / "elsewhere.so")
    refused(folder, marker, match="not part of a bundle")


def test_a_bundle_for_another_gpu_is_never_loaded(folder, marker, monkeypatch):
    found = replace(loader.detect_facts(), arch="sm_90")
    monkeypatch.setattr(loader, "detect_facts", lambda device=None: found)
    refused(folder, marker, IncompatibleError, match="sm_90a.*sm_90")


def test_a_blob_without_a_function_that_the_manifest_names_is_a_tool_error(tmp_path, marker, folder):
    armed(tmp_path / "b", marker, drop=1)
    with pytest.raises(ToolError, match="no function 'gc_"):
        gemmcache.load(folder)


def test_a_blob_that_is_no_shared_object_is_a_tool_error(folder, marker):
    manifest, blobs = bundle(2, real=False, filler=4096)
    publish(folder, manifest, blobs)
    refused(folder, marker, ToolError, match="can't be loaded")


def test_a_library_planted_beside_the_bundle_or_on_the_search_path_is_not_loaded(folder, marker, tmp_path, monkeypatch):
    """Loading goes through a descriptor: names in the working folder and in LD_LIBRARY_PATH mean nothing."""
    trap = tmp_path / "trap"
    trap.mkdir()
    other = tmp_path / "other-ran"
    source = f"""
        extern int creat(const char *, unsigned);
        __attribute__((constructor)) static void run(void) {{ creat("{other}", 0600); }}
    """
    for name in (blob_path(folder).name, "kernels.so", "libcute_dsl_runtime.so"):
        (trap / name).write_bytes(shared_object((), source))
    monkeypatch.chdir(trap)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(trap))
    gemmcache.load(folder)
    assert marker.exists()
    assert not other.exists()


def test_a_library_that_was_loaded_through_the_same_descriptor_before_is_not_taken(folder, marker, monkeypatch):
    """glibc finds libraries by the spelling of their paths: any code may have left one under this number."""
    other = shared_object(("__tvm_ffi_gc_other",))
    fd = memory.sealed_copy([other], len(other))
    ctypes.CDLL(f"/proc/self/fd/{fd}")
    taken = []

    def same_number(reader, blob):
        copy = honest(reader, blob)
        os.dup2(copy, fd)
        os.close(copy)
        taken.append(fd)
        return fd

    honest = BundleReader.load_blob_memfd
    monkeypatch.setattr(BundleReader, "load_blob_memfd", same_number)
    gemmcache.load(folder)
    assert taken == [fd]
    assert marker.exists()
