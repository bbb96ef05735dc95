"""The quack family: its space and rules, what it supports, and its pin."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemmcache.errors import MissingPackageError, UnsupportedError
from gemmcache.kernels import registry
from gemmcache.kernels.interface import Config
from gemmcache.kernels.quack import QuackFamily, family, rules
from gemmcache.problem import ProblemFamily
from gemmcache.target import TARGETS

FAMILY = QuackFamily()
PLAIN = ProblemFamily.of(4096, 4096)
H200 = TARGETS["h200"]


EPILOGUES = (
    "none",
    "bias",
    "bias+gelu",
    "relu",
    "silu+residual",
    "bias+residual*0.5",
    "swiglu",
    "geglu",
    "scale_tensor",
)


@pytest.mark.parametrize("target", ["h200", "b200", "rtx5090"])
@pytest.mark.parametrize(
    "epilogue", [*EPILOGUES, "scale_row_column+bias+gelu_tanh+residual", "swiglu+scale_row_column"]
)
def test_every_step_of_an_epilogue_is_supported(epilogue, target):
    problem_family = ProblemFamily.of(4096, 4096, epilogue=epilogue)
    assert FAMILY.unsupported(problem_family, TARGETS[target]) is None
    for config in FAMILY.configs(problem_family, TARGETS[target]):
        spec = FAMILY.spec(config, problem_family, TARGETS[target])
        assert spec.epilogue == str(problem_family.epilogue)
        assert spec.divisibility == (16 if problem_family.epilogue.gate else 8)
        assert spec.sm_count == TARGETS[target].sm_count


@pytest.mark.parametrize(("a", "b"), [("float8_e4m3fn", "float8_e4m3fn"), ("float8_e4m3fn", "float8_e5m2")])
def test_float8_is_supported_with_16_bit_results(a, b):
    problem_family = replace(ProblemFamily.of(4096, 4096, "fp8", "scale_row_column", "bf16"), a_dtype=a, b_dtype=b)
    configs = list(FAMILY.configs(problem_family, H200))
    assert FAMILY.spec(configs[0], problem_family, H200).divisibility == 16
    assert {config["tile"][2] for config in configs} == {128, 256}
    assert "spill" in rules.invalid((128, 256, 128), (1, 1), False, False, element_bytes=1)


@pytest.mark.parametrize(
    ("problem_family", "target", "reason"),
    [
        (ProblemFamily.of(4096, 4096, epilogue="swiglu+residual"), "h200", "residual"),
        (ProblemFamily.of(4096, 4096, epilogue="swiglu+bias"), "h200", "bias"),
        (ProblemFamily.of(4096, 4096, epilogue="swiglu", out="fp32"), "h200", "out dtype"),
        (ProblemFamily.of(4104, 4096, epilogue="swiglu"), "h200", "multiples of 16"),
        (ProblemFamily.of(4096, 4100), "h200", "multiples of 8"),
        (ProblemFamily.of(4104, 4096, "fp8", out="bf16"), "h200", "multiples of 16"),
        (ProblemFamily.of(4096, 4096, "fp8"), "h200", "out dtype"),
        (ProblemFamily.of(4096, 4096, "int8", out="bf16"), "h200", "dtypes"),
        (replace(PLAIN, batch=2), "h200", "batch"),
        (replace(PLAIN, out_layout="nm"), "h200", "layouts"),
        (replace(PLAIN, b_layout="kn"), "b200", "layouts"),
        (replace(ProblemFamily.of(4096, 4096, "fp8", out="bf16"), b_layout="kn"), "h200", "8-bit"),
        (replace(ProblemFamily.of(4096, 4096, epilogue="swiglu"), b_layout="kn"), "h200", "gate"),
        (replace(PLAIN, out_dtype="float16"), "h200", "out dtype"),
        (PLAIN, "a100", "sm_80"),
    ],
)
def test_the_rest_has_a_reason_and_no_configs(problem_family, target, reason):
    assert reason in FAMILY.unsupported(problem_family, TARGETS[target])
    assert list(FAMILY.configs(problem_family, TARGETS[target])) == []
    with pytest.raises(UnsupportedError, match="does not support"):
        FAMILY.spec(next(FAMILY.configs(PLAIN, H200)), problem_family, TARGETS[target])


@pytest.mark.parametrize("target", ["h200", "b200", "rtx5090"])
@pytest.mark.parametrize("epilogue", ["none", "swiglu"])
def test_the_space_is_unique_and_comes_back_from_its_encoding(target, epilogue):
    configs = list(FAMILY.configs(ProblemFamily.of(4096, 4096, epilogue=epilogue), TARGETS[target]))
    assert len(configs) == len(set(configs)) > 8
    for config in configs:
        assert Config.from_value(config.to_value()) == config


def test_the_space_on_hopper_reaches_small_and_odd_token_tiles():
    configs = list(FAMILY.configs(PLAIN, H200))
    for config in configs:
        assert rules.invalid(config["tile"], config["cluster"], config["pingpong"], config["swap_ab"]) is None
    assert {config["tile"][1] for config in configs if config["swap_ab"]} == set(range(16, 129, 16))
    assert {config["pingpong"] for config in configs} == {True, False}


@pytest.mark.parametrize(
    ("arguments", "gate", "reason"),
    [
        (((128, 256, 64), (1, 1), True, False), False, "pingpong"),
        (((320, 192, 64), (1, 1), False, False), False, "320"),
        (((64, 24, 64), (1, 1), True, True), False, "multiple"),
        (((128, 128, 64), (4, 2), False, False), False, "clusters"),
        (((256, 256, 128), (1, 1), False, False), False, "stages"),
        (((128, 128, 128), (1, 1), False, False), False, "deep K"),
        (((64, 32, 64), (1, 1), False, False), False, "few tokens"),
        (((128, 192, 64), (1, 1), False, True), False, "without a swap"),
        (((128, 208, 64), (1, 1), True, False), True, "half a gated tile"),
        (((192, 160, 64), (1, 1), False, False), True, "two warp groups"),
    ],
)
def test_each_exclusion_on_hopper_says_why(arguments, gate, reason):
    assert reason in (rules.invalid(*arguments, gate=gate) or "")


@pytest.mark.parametrize(
    ("reason", "found"),
    [
        ("pair", rules.invalid_sm100((256, 128), (1, 1), False)),
        ("both rows", rules.invalid_sm100((128, 64), (1, 1), True, gate=True)),
        ("half", rules.invalid_sm100((128, 80), (1, 1), False, gate=True)),
        ("few tokens", rules.invalid_sm100((128, 32), (1, 1), False)),
        ("without a swap", rules.invalid_sm100((128, 192), (1, 1), True)),
        ("two tiles", rules.invalid_sm100((128, 64), (1, 2), True)),
        ("spill", rules.invalid_sm120((128, 192), True, False)),
        ("verified", rules.invalid_sm120((128, 128), False, True, gate=True)),
        ("8-bit", rules.invalid_sm120((128, 160), False, False, element_bytes=1)),
        ("aborts", rules.invalid((320, 160, 64), (1, 1), False, False, b_layout="kn")),
    ],
)
def test_each_exclusion_on_blackwell_says_why(reason, found):
    assert reason in found


def test_a_pair_of_ctas_shares_a_tile_on_blackwell():
    config = next(c for c in FAMILY.configs(PLAIN, TARGETS["b200"]) if c["tile"][0] == 256)
    assert FAMILY.cta_tile(config)[0] == 128


def test_a_config_outside_the_space_is_refused():
    config = next(FAMILY.configs(PLAIN, H200))
    other = Config.of("quack", **{**config.as_dict(), "max_swizzle": 3})
    with pytest.raises(UnsupportedError, match="space"):
        FAMILY.spec(other, PLAIN, H200)


def test_the_sm_count_is_part_of_the_kernel():
    config = next(FAMILY.configs(PLAIN, H200))
    specs = {FAMILY.spec(config, PLAIN, TARGETS[t]) for t in ("h200", "h20")}
    assert len(specs) == 2


def test_another_version_is_refused_by_name(monkeypatch):
    spec = FAMILY.spec(next(FAMILY.configs(PLAIN, H200)), PLAIN, H200)
    monkeypatch.setattr(family, "package_version", lambda name: "0.7.0")
    with pytest.raises(MissingPackageError, match=r"0\.6\.5 is needed, 0\.7\.0 is installed"):
        FAMILY.compile(spec, "gc_x")
    assert not family.installed()


def test_without_the_package_the_family_is_not_offered(monkeypatch):
    monkeypatch.setattr(registry, "quack_installed", lambda: False)
    registry.kernel_families.cache_clear()
    try:
        assert "quack" not in registry.kernel_families()
        assert "operators" in registry.kernel_families()
    finally:
        registry.kernel_families.cache_clear()
