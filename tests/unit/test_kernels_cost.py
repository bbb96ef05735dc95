"""The rates that the cost model starts from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemmcache.kernels import cost
from gemmcache.problem import ProblemFamily
from gemmcache.target import TARGETS, Target


@pytest.mark.parametrize("name", TARGETS)
def test_every_named_target_has_rates_of_its_own(name):
    assert TARGETS[name].product in cost._RATES


@pytest.mark.parametrize("name", ["a100", "h100", "b200", "rtx5090"])
def test_another_product_of_an_arch_takes_its_rates_by_the_number_of_sms(name):
    known = TARGETS[name]
    other = replace(known, product="NVIDIA Something", sm_count=known.sm_count // 2)
    rates, scale = cost.rates_of(known), other.sm_count / known.sm_count
    found = cost.rates_of(other)
    assert found.tflops == pytest.approx(rates.tflops * scale)
    assert found.tbps == pytest.approx(rates.tbps * scale)


def test_an_arch_that_nothing_is_known_of_has_rates_too():
    assert cost.rates_of(Target("sm_89", 128, 72 << 20, 101376, "NVIDIA GeForce RTX 4090")).tflops > 0


@pytest.mark.parametrize("m", [1, 8192])
def test_faster_products_are_expected_to_be_faster(m):
    problem = ProblemFamily.of(8192, 8192).at(m)
    order = ("rtx5090", "h100", "b200")
    times = [cost.estimate_us(problem, TARGETS[name], tile=(128, 128)) for name in order]
    assert times == sorted(times, reverse=True)
