"""Tuning packs: what is written comes back, and nothing foreign or damaged is measured."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmcache.cli.app import run
from gemmcache.errors import IncompatibleError, IntegrityError, StorageError, UsageError
from gemmcache.kernels.interface import Config
from gemmcache.kernels.registry import known_families
from gemmcache.problem import ProblemFamily
from gemmcache.records.interface import FAILED, Trial
from gemmcache.target import TARGETS, Host
from gemmcache.tuning import pack as packs
from gemmcache.tuning.candidates import CandidateSet
from gemmcache.tuning.pack import MANIFEST, Pack, PackedCandidates, make_pack, read_pack
from tests.fakes import H200, TOOLCHAIN, candidate

HOST = Host("x86_64", "x86-64-v3")
PLAIN, WIDE, BIASED = ProblemFamily.of(64, 64), ProblemFamily.of(128, 64), ProblemFamily.of(64, 64, epilogue="bias")
PROBLEMS = [WIDE.at(16), WIDE.at(1), PLAIN.at(16), BIASED.at(1)]
BROKEN = (Trial(Config.of("fake", tile=(1, 1)), FAILED, detail="does not compile"),)


class Compiled:
    """Stands in for the compiler: plain families share a library, the biased one has no candidate at all."""

    host, toolchain = HOST, TOOLCHAIN

    def __init__(self, folder):
        data = b"\x7fELF" + bytes(range(256)) * 500
        self.path = folder / "candidates.so"
        self.path.write_bytes(data)
        self.digest = packs.codec.bytes_digest(data)

    def candidates(self, family, target, progress=None):
        if family.epilogue:
            return CandidateSet((), BROKEN, "", "")
        return CandidateSet((candidate(0), candidate(1)), BROKEN, str(self.path), self.digest)


@pytest.fixture
def packed(tmp_path):
    make_pack(tmp_path / "x.pack", "x", PROBLEMS, H200, Compiled(tmp_path))
    return tmp_path / "x.pack"


def test_what_was_packed_comes_back(packed, tmp_path):
    (tmp_path / "there").mkdir()
    opened = PackedCandidates(packed, tmp_path / "there")
    pack = opened.pack
    assert (pack.name, pack.target, pack.host, pack.toolchain) == ("x", H200, HOST, TOOLCHAIN)
    assert pack.problems == tuple(PROBLEMS)
    assert pack.kernel_families == {"fake"}
    assert len(pack.sets) == 2
    plain, wide = (opened.candidates(family, H200) for family in (PLAIN, WIDE))
    assert plain == wide
    assert plain.candidates == (candidate(0), candidate(1))
    assert plain.broken == BROKEN
    assert Path(plain.library).read_bytes() == (tmp_path / "candidates.so").read_bytes()
    assert opened.candidates(BIASED, H200) == CandidateSet((), BROKEN, "", "")
    with pytest.raises(UsageError, match="not in the pack"):
        opened.candidates(ProblemFamily.of(256, 64), H200)


def test_equal_packs_are_equal_bytes_and_replace_each_other_at_once(packed, tmp_path):
    first = packed.read_bytes()
    make_pack(packed, "x", PROBLEMS, H200, Compiled(tmp_path))
    assert packed.read_bytes() == first
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    assert packed.stat().st_mode & 0o777 == 0o644
    with pytest.raises(StorageError):
        make_pack(tmp_path / "nowhere" / "x.pack", "x", PROBLEMS, H200, Compiled(tmp_path))


def test_another_gpu_a_lesser_host_or_another_tvm_ffi_is_refused(packed):
    pack = read_pack(packed)
    same = pack.toolchain.tvm_ffi
    major, minor, *_ = same.split(".")
    pack.check_runs_on(H200, Host("x86_64", "x86-64-v4"), f"{major}.{minor}.999")
    for target in ("h100", "h20", "b200"):
        with pytest.raises(IncompatibleError, match=TARGETS[target].product):
            pack.check_runs_on(TARGETS[target], HOST, same)
    for host in (Host("x86_64", "x86-64-v2"), Host("aarch64", "aarch64")):
        with pytest.raises(IncompatibleError, match="host: made for"):
            pack.check_runs_on(H200, host, same)
    with pytest.raises(IncompatibleError, match="tvm_ffi: made for"):
        pack.check_runs_on(H200, HOST, f"{major}.{int(minor) + 1}.0")


def test_a_library_with_other_bytes_is_refused_before_it_is_used(packed, tmp_path):
    pack = read_pack(packed)
    (blob,) = {s.blob for s in pack.sets if s.blob}
    for data in (b"x" * blob.size, b"x", b"x" * (blob.size + 1)):
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr(MANIFEST, pack.encode())
            archive.writestr(blob.digest, data)
        with pytest.raises(IntegrityError, match=blob.digest):
            PackedCandidates(packed, tmp_path).candidates(PLAIN, H200)
        assert not (tmp_path / f"{blob.digest}.so").exists()


def test_an_archive_that_unpacks_to_more_than_it_may_is_refused(packed, monkeypatch):
    monkeypatch.setattr(packs, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(IntegrityError, match="larger"):
        read_pack(packed)


@given(st.data())
def test_any_damage_is_a_typed_error_or_the_same_pack(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("pack")
    path = folder / "x.pack"
    pack = make_pack(path, "x", PROBLEMS, H200, Compiled(folder))
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(content[: data.draw(st.integers(at, len(content)))]))
    try:
        opened = PackedCandidates(path, folder)
        opened.candidates(PLAIN, H200)
    except (IntegrityError, IncompatibleError):
        return
    assert opened.pack == pack


@pytest.mark.parametrize("change", ["format", "major", "sets", "blob"])
def test_a_manifest_that_contradicts_itself_is_refused(packed, change):
    pack = read_pack(packed)
    value = packs.codec.decode(pack.encode(), floats=True)
    if change == "format":
        value["format"] = "gemmcache-bundle"
    elif change == "major":
        value["major"] = 2
    elif change == "sets":
        value["sets"] = value["sets"][:1]
    else:
        value["sets"][0]["blob"] = None
    kind, text = (IncompatibleError, "version 2") if change == "major" else (IntegrityError, change)
    with pytest.raises(kind, match=text):
        Pack.decode(packs.codec.encode(value, floats=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "SOURCE or --pack"),
        (["llama-3.1-8b", "--pack", "x.pack"], "SOURCE or --pack"),
        (["--pack", "x.pack", "--fuse"], "made with its options"),
        (["--pack", "x.pack"], "does not exist"),
    ],
)
def test_the_command_line_takes_a_source_or_a_pack(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_pack_without_problems_at_the_ms_asked_for_says_so(packed, capsys):
    assert run(["tune", "--pack", str(packed), "--m", "4096"]) == 2
    assert "--m" in capsys.readouterr().err


def test_cost_models_are_known_without_the_packages(monkeypatch):
    from gemmcache.kernels import registry

    monkeypatch.setattr(registry, "quack_installed", lambda: False)
    registry.kernel_families.cache_clear()
    try:
        assert [f.name for f in known_families(["quack", "operators", "fake"])] == ["operators", "quack"]
    finally:
        registry.kernel_families.cache_clear()


def test_pack_tells_what_it_wrote(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("gemmcache.tuning.candidates.CompiledCandidates", lambda *_: Compiled(tmp_path))
    source = tmp_path / "problems.json"
    source.write_text(json.dumps([{"n": 64, "k": 64, "ms": [1, 16]}]))
    arguments = ["pack", str(source), "--target", "h200", "--out", str(tmp_path / "y.pack")]
    assert run([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["problems"], told["candidates"], told["broken"]) == (2, 2, 1)
    assert told["bytes"] == (tmp_path / "y.pack").stat().st_size
    assert read_pack(tmp_path / "y.pack").problems == (PLAIN.at(1), PLAIN.at(16))
    assert run(arguments) == 0
    assert "2 problems" in capsys.readouterr().out
