"""Tuning packs by the command line: made with a compiler and a linker, opened without either."""

from __future__ import annotations

import json

from gemmcache.bundle import elf
from gemmcache.bundle.interface import function_name, symbol_name
from gemmcache.target import TARGETS
from gemmcache.tuning.pack import PackedCandidates
from tests.integration.commands import environment, gemmcache, needs_compiler

#: No compiler can be imported, and no linker is found.
POISONED = "import os, sys\nos.environ['PATH'] = ''\nfor name in ('cutlass', 'quack'):\n    sys.modules[name] = None\n"


@needs_compiler
def test_a_pack_holds_the_kernels_of_its_candidates_and_names_those_that_did_not_compile(toy, tmp_path):
    source = tmp_path / "problems.json"
    source.write_text(json.dumps([{"n": 64, "k": 64, "dtype": "fp32", "ms": [1, 16]}]))
    env = environment(tmp_path / "cache", tmp_path / "records", toy, TOY_TILE_64="abort")
    out = tmp_path / "toy.pack"
    arguments = ("pack", source, "--target", "h200", "--family", "toy", "--out", out)
    done = gemmcache(*arguments, "--json", env=env)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["problems"], told["candidates"], told["broken"]) == (2, 3, 1)

    opened = PackedCandidates(out, tmp_path)
    (packed,) = opened.pack.sets
    made = opened.candidates(packed.families[0], TARGETS["h200"])
    with open(made.library, "rb") as file:
        exported = elf.exports(file.read())
    assert {symbol_name(function_name(c.kernel)) for c in made.candidates} <= set(exported)
    assert [dict(t.config.params)["tile"] for t in made.broken] == [64]
    assert "died" in made.broken[0].detail

    # The same from the object cache; a kernel that dies is compiled, and dies, again.
    first = out.read_bytes()
    assert gemmcache(*arguments, env=env).returncode == 0
    assert out.read_bytes() == first


@needs_compiler
def test_measuring_a_pack_asks_for_a_gpu_and_for_nothing_else(toy, tmp_path):
    source = tmp_path / "problems.json"
    source.write_text(json.dumps([{"n": 64, "k": 64, "dtype": "fp32", "ms": [1]}]))
    out = tmp_path / "toy.pack"
    env = environment(tmp_path / "cache", tmp_path / "records", toy)
    done = gemmcache("pack", source, "--target", "h200", "--family", "toy", "--out", out, env=env)
    assert done.returncode == 0, done.stderr
    # The family that it is of is not installed here, nor is any compiler; no device is visible.
    there = environment(tmp_path / "there", tmp_path / "records", CUDA_VISIBLE_DEVICES="")
    done = gemmcache("tune", "--pack", out, env=there, before=POISONED)
    assert done.returncode == 5
    assert "no CUDA device" in done.stderr
