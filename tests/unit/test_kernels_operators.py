"""The operators family: what it supports, its space, its identity."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemmcache.errors import UnsupportedError
from gemmcache.kernels.identity import kernel_digest
from gemmcache.kernels.interface import Config
from gemmcache.kernels.operators import OperatorsFamily
from gemmcache.problem import ProblemFamily
from gemmcache.target import TARGETS, Host
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
        ({"out_dtype": "float32"}, "out dtype"),
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


def test_an_epilogue_and_an_unknown_arch_are_unsupported():
    assert "bias" in (FAMILY.unsupported(ProblemFamily.of(64, 64, epilogue="bias"), TARGETS["h200"]) or "")
    assert FAMILY.unsupported(PLAIN, replace(TARGETS["h200"], arch="sm_75"))


@pytest.mark.parametrize(("name", "kernel"), [("a100", "sm80"), ("h200", "sm90"), ("b200", "sm100")])
def test_the_space_is_unique_ordered_and_for_the_arch(name, kernel):
    target = TARGETS[name]
    space = list(FAMILY.configs(PLAIN, target))
    assert len(space) == len(set(space))
    assert space == list(FAMILY.configs(PLAIN, target))
    assert {c["kernel"] for c in space} == {kernel}
    for config in space:
        assert Config.from_value(config.to_value()) == config
        assert FAMILY.spec(config, PLAIN, target).arch == target.arch


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
    clc = next(c for c in FAMILY.configs(PLAIN, TARGETS["b200"]) if c["scheduler"] == "clc")
    assert FAMILY.spec(clc, PLAIN, TARGETS["b200"]).sm_count is None


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


def test_estimates_are_positive_and_grow_with_the_work():
    target = TARGETS["h200"]
    for config in FAMILY.configs(PLAIN, target):
        small, large = (FAMILY.estimate_us(config, PLAIN.at(m), target) for m in (1, 16384))
        assert 0 < 10 * small < large
