"""The quack family: its space and rules, what it supports, and its pin."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemmcache.errors import MissingPackageError, UnsupportedError
from gemmcache.kernels import registry
from gemmcache.kernels.interface import Config
from gemmcache.kernels.quack import QuackFamily, family, space
from gemmcache.problem import ProblemFamily
from gemmcache.target import TARGETS

FAMILY = QuackFamily()
PLAIN = ProblemFamily.of(4096, 4096)
H200 = TARGETS["h200"]


@pytest.mark.parametrize("epilogue", ["none", "bias", "residual", "bias+residual"])
def test_linear_epilogues_are_supported(epilogue):
    problem_family = ProblemFamily.of(4096, 4096, epilogue=epilogue)
    assert FAMILY.unsupported(problem_family, H200) is None
    config = next(FAMILY.configs(problem_family, H200))
    assert FAMILY.spec(config, problem_family, H200).epilogue == epilogue


@pytest.mark.parametrize(
    ("problem_family", "target"),
    [
        (ProblemFamily.of(4096, 4096, epilogue="bias+gelu"), "h200"),
        (ProblemFamily.of(4096, 4096, epilogue="residual*0.5"), "h200"),
        (ProblemFamily.of(4096, 4100), "h200"),
        (ProblemFamily.of(4096, 4096, "fp8"), "h200"),
        (replace(PLAIN, batch=2), "h200"),
        (replace(PLAIN, b_layout="kn"), "h200"),
        (replace(PLAIN, out_dtype="float32"), "h200"),
        (PLAIN, "b200"),
    ],
)
def test_the_rest_has_a_reason_and_no_configs(problem_family, target):
    assert FAMILY.unsupported(problem_family, TARGETS[target])
    assert list(FAMILY.configs(problem_family, TARGETS[target])) == []


def test_the_space_is_unique_valid_and_reaches_small_token_tiles():
    configs = list(FAMILY.configs(PLAIN, H200))
    assert len(configs) == len(set(configs)) > 100
    for config in configs:
        assert space.invalid(config["tile"], config["cluster"], config["pingpong"], config["swap_ab"]) is None
        assert Config.from_value(config.to_value()) == config
    assert {config["tile"][1] for config in configs if config["swap_ab"]} >= {16, 32, 64, 128}
    assert {config["pingpong"] for config in configs} == {True, False}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (((128, 256, 64), (1, 1), True, False), "pingpong"),
        (((320, 192, 64), (1, 1), False, False), "320"),
        (((64, 24, 64), (1, 1), True, True), "multiple"),
        (((128, 128, 64), (4, 2), False, False), "clusters"),
        (((256, 256, 128), (1, 1), False, False), "stages"),
        (((128, 128, 128), (1, 1), False, False), "deep K"),
        (((64, 32, 64), (1, 1), False, False), "few tokens"),
        (((128, 192, 64), (1, 1), False, True), "without a swap"),
    ],
)
def test_each_exclusion_says_why(arguments, reason):
    assert reason in (space.invalid(*arguments) or "")


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
