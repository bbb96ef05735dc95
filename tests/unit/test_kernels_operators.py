"""The operators family: what it supports, its space, its identity."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmcache import dtypes
from gemmcache.errors import UnsupportedError
from gemmcache.kernels.identity import kernel_digest
from gemmcache.kernels.interface import Config
from gemmcache.kernels.operators import OperatorsFamily, rules
from gemmcache.problem import ProblemFamily
from gemmcache.target import TARGETS, Host
from tests.conftest import ROOT
from tests.fakes import TOOLCHAIN

FAMILY = OperatorsFamily()
PLAIN = ProblemFamily.of(4096, 4096)
HOST = Host("x86_64", "x86-64-v3")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n": 4100}, "multiples"),
        ({"k": 4097}, "multiples"),
        ({"a_dtype": "float16"}, "differ"),
        ({"b_dtype": "int8"}, "differ"),
        ({"out_dtype": "float16"}, "out dtype"),
        ({"out_dtype": "int32"}, "out dtype"),
        ({"a_dtype": "float32", "b_dtype": "float32"}, "dtype float32"),
        ({"acc_dtype": "float16"}, "accumulator"),
        ({"batch": 2}, "batch"),
        ({"a_layout": "km"}, "layouts"),
        ({"b_layout": "kn"}, "layouts"),
        ({"out_layout": "nm"}, "layouts"),
    ],
)
def test_what_it_does_not_support_has_a_reason_and_no_configs(change, reason):
    family = replace(PLAIN, **change)
    assert reason in (FAMILY.unsupported(family, TARGETS["h200"]) or "")
    assert list(FAMILY.configs(family, TARGETS["h200"])) == []


EPILOGUES = (
    "relu", "gelu", "gelu_tanh", "silu", "bias", "bias+relu", "residual", "residual*-0.5", "bias+residual",
    "bias+gelu_tanh+residual", "scale_tensor", "scale_column+bias",
)  # fmt: skip


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogues_are_for_sm_100a(epilogue):
    fused = ProblemFamily.of(64, 64, epilogue=epilogue)
    assert FAMILY.unsupported(fused, TARGETS["b200"]) is None
    for name in ("a100", "h200"):
        assert f"epilogue {fused.epilogue}" in (FAMILY.unsupported(fused, TARGETS[name]) or "")


@pytest.mark.parametrize("epilogue", ["swiglu", "bias+geglu", "scale_row", "scale_row_column+bias"])
def test_epilogues_that_no_kernel_fuses_have_a_reason(epilogue):
    family = ProblemFamily.of(64, 64, epilogue=epilogue)
    assert f"epilogue {family.epilogue}: " in (FAMILY.unsupported(family, TARGETS["b200"]) or "")


@pytest.mark.parametrize("arch", ["sm_75", "sm_89", "sm_90", "sm_100", "sm_103a", "sm_120a"])
def test_other_arches_have_no_kernels(arch):
    assert FAMILY.unsupported(PLAIN, replace(TARGETS["h200"], arch=arch)) == f"no kernels for {arch}"


@pytest.mark.parametrize(
    ("dtype", "outs"),
    [
        ("bfloat16", ("bfloat16", "float32")),
        ("float16", ("float16", "float32")),
        ("float8_e4m3fn", ("bfloat16", "float16", "float32")),
        ("float8_e5m2", ("bfloat16", "float16", "float32")),
        ("int8", ("int32", "float32")),
        ("float32", ()),
    ],
)
def test_dtypes(dtype, outs):
    for out in dtypes.SIZES:
        family = ProblemFamily.of(64, 64, dtype, out=out)
        for name in ("h200", "b200"):
            assert (FAMILY.unsupported(family, TARGETS[name]) is None) == (out in outs)
        narrow = FAMILY.unsupported(family, TARGETS["a100"]) is None
        assert narrow == (out == dtype and dtype in ("bfloat16", "float16"))


def test_an_epilogue_of_int8_operands_gives_floats():
    def reason(epilogue, out):
        return FAMILY.unsupported(ProblemFamily.of(64, 64, "int8", epilogue, out), TARGETS["b200"])

    assert reason("scale_tensor", "float32") is None
    assert "float32" in (reason("bias", "int32") or "")


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8"])
def test_n_and_k_are_multiples_of_16_bytes_of_operands(dtype):
    limit = 16 // dtypes.SIZES[dtype]
    for name in ("h200", "b200"):
        good = ProblemFamily.of(limit, limit, dtype, out="float32")
        config = next(FAMILY.configs(good, TARGETS[name]))
        spec = FAMILY.spec(config, good, TARGETS[name])
        assert (spec.divisibility, spec.align_bytes) == (limit, 16)
        assert spec.serves(good)
        for n, k in ((limit // 2, limit), (limit, limit // 2)):
            assert f"multiples of {limit}" in (FAMILY.unsupported(replace(good, n=n, k=k), TARGETS[name]) or "")


FLOAT8 = ProblemFamily.of(4096, 4096, "float8_e4m3fn", out="bfloat16")
SPACES = [
    ("a100", PLAIN, {"sm80"}),
    ("h200", PLAIN, {"sm90"}),
    ("h200", FLOAT8, {"sm90"}),
    ("b200", PLAIN, {"sm100", "sm100_preferred", "sm100_tgv"}),
    # The low-latency kernel writes a's dtype or float32.
    ("b200", FLOAT8, {"sm100", "sm100_preferred"}),
    ("b200", replace(FLOAT8, out_dtype="float32"), {"sm100", "sm100_preferred", "sm100_tgv"}),
    ("b200", ProblemFamily.of(4096, 4096, "int8", out="int32"), {"sm100", "sm100_preferred"}),
    ("b200", ProblemFamily.of(4096, 4096, epilogue="bias"), {"sm100_fused"}),
]


@pytest.mark.parametrize(("name", "family", "kernels"), SPACES)
def test_the_space_is_unique_ordered_and_for_the_arch(name, family, kernels):
    target = TARGETS[name]
    space = list(FAMILY.configs(family, target))
    assert len(space) == len(set(space))
    assert space == list(FAMILY.configs(family, target))
    assert {c["kernel"] for c in space} == kernels
    for config in space:
        assert Config.from_value(config.to_value()) == config
        spec = FAMILY.spec(config, family, target)
        assert spec.arch == target.arch
        assert spec.serves(family)


TILES, CLUSTERS = (
    st.tuples(st.integers(-64, 512), st.integers(-64, 512)),
    st.tuples(st.integers(0, 17), st.integers(0, 17)),
)


@given(TILES, CLUSTERS, st.booleans(), st.booleans())
def test_what_the_rules_let_through_is_what_the_kernels_state(tile, cluster, two_cta, swap_ab):
    if rules.invalid_sm100(tile, cluster, two_cta, swap_ab) is None:
        rows = tile[0] // 2 if two_cta else tile[0]
        assert rows in (64, 128)
        assert tile[1] in range(32, 257, 32)
        assert cluster[0] % (2 if two_cta else 1) == 0
        assert all(c in (1, 2, 4, 8, 16) for c in cluster)
        assert cluster[0] * cluster[1] <= 16
    if rules.invalid_sm90(tile, cluster) is None:
        assert tile[0] in (64, 128)
        assert tile[1] in (64, 128, 256)
        assert cluster[0] * cluster[1] in (1, 2, 4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scheduler": "static"}, "empty"),
        ({"preferred": (2, 1)}, "equal"),
        ({"fallback": (2, 4)}, "whole"),
        ({"tile": (64, 128), "two_cta": False, "fallback": (1, 1)}, "small"),
        ({"fallback": (1, 1)}, "pair"),
        ({"preferred": (8, 4)}, "16"),
    ],
)
def test_preferred_clusters_that_are_not_offered_have_a_reason(change, reason):
    good = {"tile": (256, 128), "fallback": (2, 1), "preferred": (4, 2), "two_cta": True, "scheduler": "clc"}
    assert rules.invalid_preferred(**good) is None
    assert reason in (rules.invalid_preferred(**{**good, **change}) or "")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (((64, 8), "bfloat16", "bfloat16"), None),
        (((64, 32), "float8_e4m3fn", "float32"), None),
        (((128, 8), "bfloat16", "bfloat16"), "M of a tile"),
        (((64, 64), "bfloat16", "bfloat16"), "N of a tile"),
        (((64, 8), "int8", "float32"), "floating-point"),
        (((64, 8), "float8_e4m3fn", "bfloat16"), "out"),
    ],
)
def test_the_low_latency_kernel(arguments, reason):
    found = rules.invalid_tgv(*arguments)
    assert found is None if reason is None else reason in (found or "")


def test_the_low_latency_kernel_is_never_expected_to_serve_more_tokens_than_its_grid_takes():
    target = TARGETS["b200"]
    config = next(c for c in FAMILY.configs(PLAIN, target) if c["kernel"] == "sm100_tgv" and c["tile"] == (64, 8))
    assert FAMILY.estimate_us(config, PLAIN.at(65535 * 8), target) < math.inf
    assert FAMILY.estimate_us(config, PLAIN.at(65535 * 8 + 1), target) == math.inf
    assert FAMILY.spec(config, PLAIN, target).sm_count is None


def test_a_config_outside_the_space_is_refused():
    config = Config.of("operators", kernel="sm90", tile=(96, 64), cluster=(1, 1), swap_ab=False, swizzle=1)
    with pytest.raises(UnsupportedError, match="space"):
        FAMILY.spec(config, PLAIN, TARGETS["h200"])


def test_the_sm_count_is_part_of_a_kernel_that_bakes_it_in_and_of_no_other():
    h200, h20 = TARGETS["h200"], TARGETS["h20"]
    config = next(FAMILY.configs(PLAIN, h200))
    assert FAMILY.spec(config, PLAIN, h200) != FAMILY.spec(config, PLAIN, h20)
    a100 = TARGETS["a100"]
    config = next(FAMILY.configs(PLAIN, a100))
    assert FAMILY.spec(config, PLAIN, a100).sm_count is None
    for config in FAMILY.configs(PLAIN, TARGETS["b200"]):
        static = config.as_dict().get("scheduler") == "static"
        assert FAMILY.spec(config, PLAIN, TARGETS["b200"]).sm_count == (148 if static else None)
    biased = ProblemFamily.of(64, 64, epilogue="bias")
    assert {FAMILY.spec(c, biased, TARGETS["b200"]).sm_count for c in FAMILY.configs(biased, TARGETS["b200"])} == {148}


def test_everything_that_determines_the_bytes_changes_the_kernel_digest():
    spec = FAMILY.spec(next(FAMILY.configs(PLAIN, TARGETS["h200"])), PLAIN, TARGETS["h200"])
    digests = {
        kernel_digest(spec, TOOLCHAIN, HOST),
        kernel_digest(replace(spec, sm_count=78), TOOLCHAIN, HOST),
        kernel_digest(replace(spec, a_dtype="float16"), TOOLCHAIN, HOST),
        kernel_digest(spec, replace(TOOLCHAIN, dsl="4.9.0"), HOST),
        kernel_digest(spec, replace(TOOLCHAIN, tvm_ffi="0.2.0"), HOST),
        kernel_digest(spec, replace(TOOLCHAIN, cuda_major=12), HOST),
        kernel_digest(spec, replace(TOOLCHAIN, kernel_sources=(("operators", "1" * 64),)), HOST),
        kernel_digest(spec, TOOLCHAIN, replace(HOST, isa="x86-64-v4")),
    }
    assert len(digests) == 8
    # The sources of a family that this kernel does not come from change nothing.
    other = replace(TOOLCHAIN, kernel_sources=(*TOOLCHAIN.kernel_sources, ("zzz", "2" * 64)))
    assert kernel_digest(spec, other, HOST) in digests


def test_the_source_digest_is_stable_and_needs_no_compiler():
    assert FAMILY.source_digest() == OperatorsFamily().source_digest()
    assert len(FAMILY.source_digest()) == 64


@pytest.mark.parametrize("name", ["a100", "h200", "b200"])
def test_estimates_are_positive_and_grow_with_the_work(name):
    target = TARGETS[name]
    for config in FAMILY.configs(PLAIN, target):
        small, large = (FAMILY.estimate_us(config, PLAIN.at(m), target) for m in (1, 16384))
        assert 0 < 10 * small < large


def test_a_config_of_another_problem_is_refused():
    config = next(FAMILY.configs(PLAIN, TARGETS["b200"]))
    with pytest.raises(UnsupportedError, match="space"):
        FAMILY.spec(config, ProblemFamily.of(4096, 4096, epilogue="bias"), TARGETS["b200"])
    with pytest.raises(UnsupportedError, match="sm_120a"):
        FAMILY.spec(config, PLAIN, TARGETS["rtx5090"])


def test_the_documentation_lists_the_kernels():
    section = (ROOT / "docs" / "tuning.md").read_text().partition("## The family operators")[2].partition("\n## ")[0]
    listed = {tuple(re.findall(r"[\w]+", line)[:2]) for line in section.splitlines() if line.startswith("| `")}
    assert listed == {(c["kernel"], TARGETS[n].arch) for n, f, _ in SPACES for c in FAMILY.configs(f, TARGETS[n])}
