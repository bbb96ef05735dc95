"""docs/bundle-format.md is true: its example is what the encoder writes, and a reader made from it alone works."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from gemmcache.bundle.interface import LIBRARY, PREDICTED, DispatchTable, Entry, Manifest, Part
from gemmcache.bundle.reader import BundleReader
from gemmcache.environment import Toolchain
from gemmcache.problem import ProblemFamily
from gemmcache.target import Host, Target
from tests import second_reader
from tests.strategies_bundle import manifests, published


def test_the_documented_example_is_what_is_written(root: Path) -> None:
    text = (root / "docs/bundle-format.md").read_text()
    block = re.search(r"```hex\n(.*?)```", text, re.DOTALL)
    assert block is not None
    data = bytes.fromhex(block[1])
    family = ProblemFamily.of(64, 32)
    part = Part(
        target=Target("sm_90a", 132, 62914560, 232448, "NVIDIA H200"),
        host=Host("x86_64", "x86-64-v2", "gnu"),
        toolchain=Toolchain(),
        driver=None,
        cuda_runtime=None,
        blob=None,
        kernels=(),
        tables=(DispatchTable(family, (Entry(16, LIBRARY, PREDICTED, library_us=2.5),), 3),),
    )
    manifest = Manifest("tiny", 1, "doc", (part,))
    assert manifest.encode() == data
    assert Manifest.decode(data) == manifest
    assert f"Digest of the bundle: `{hashlib.sha256(data).hexdigest()}`" in text
    assert f"Family digest: `{family.digest}`" in text
    assert f"A manifest of {len(data)} bytes" in text
    assert part.tables[0].ladder.steps() == ((9, 16),)


def test_the_second_reader_reads_what_the_writer_wrote(tmp_path: Path) -> None:
    manifest = published(tmp_path / "b")
    other = second_reader.Bundle(str(tmp_path / "b"))
    with BundleReader.open(tmp_path / "b") as reader:
        assert other.digest == reader.digest
        assert other.blobs == {blob.digest: reader.read_blob(blob) for blob in manifest.blobs}
    for mine, theirs in zip(manifest.parts, other.manifest["parts"], strict=True):
        assert [k.symbol for k in mine.kernels] == [other.symbol(k) for k in theirs["kernels"]]
        for table, their_table in zip(mine.tables, theirs["tables"], strict=True):
            for m in range(1, 300):
                index, _ = table.ladder.locate(m)
                entry = other.entry(their_table, m)
                assert (entry and entry["m"]) == (None if index is None else table.entries[index].m)


@given(manifests())
@settings(max_examples=50)
def test_the_second_reader_agrees_on_any_manifest(manifest: Manifest) -> None:
    other = second_reader.Bundle.__new__(second_reader.Bundle)
    other.manifest = manifest.to_value()
    other.check_manifest()


def test_the_second_reader_refuses_what_is_damaged(tmp_path: Path) -> None:
    manifest = published(tmp_path / "b")
    blob = tmp_path / "b/blobs" / manifest.blobs[0].digest
    blob.write_bytes(blob.read_bytes()[::-1])
    with pytest.raises(second_reader.Refused, match="digest"):
        second_reader.Bundle(str(tmp_path / "b"))
    published(tmp_path / "b")
    bad = replace(manifest, version=0)
    (tmp_path / "b/manifest.msgpack").write_bytes(bad.encode())
    with pytest.raises(second_reader.Refused, match="version"):
        second_reader.Bundle(str(tmp_path / "b"))


def test_the_second_reader_needs_nothing_of_the_package(root: Path, tmp_path: Path) -> None:
    published(tmp_path / "b")
    program = (
        "import sys; sys.modules['gemmcache'] = None; sys.path.insert(0, sys.argv[1]); import second_reader;"
        "print(second_reader.Bundle(sys.argv[2]).digest)"
    )
    command = [sys.executable, "-c", program, str(root / "tests"), str(tmp_path / "b")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    with BundleReader.open(tmp_path / "b") as reader:
        assert done.stdout.strip() == reader.digest
