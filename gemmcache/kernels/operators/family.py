"""The kernel family `operators`."""

from __future__ import annotations

import math

from gemmcache.kernels.dense import DenseFamily
from gemmcache.kernels.interface import Config
from gemmcache.kernels.operators import rules
from gemmcache.kernels.operators.space import FAMILY, space
from gemmcache.problem import Problem, ProblemFamily
from gemmcache.target import Target


class OperatorsFamily(DenseFamily):
    """nvidia-cutlass-operators: out = a @ b.T of 16-bit floats, float8 and int8; on sm_100a with an epilogue of
    scales, bias, activation and residual."""

    name = FAMILY
    package = "nvidia-cutlass-operators"
    sources = "cutlass/operators/"
    extra = "build"
    entry_module = "gemmcache.kernels.operators.entry"

    def excluded(self, family: ProblemFamily, arch: str) -> str | None:
        return rules.excluded(family, arch)

    def space(self, family: ProblemFamily, arch: str) -> tuple[Config, ...]:
        return space(family, arch)

    def divisibility(self, family: ProblemFamily) -> int:
        return rules.divisibility_of(family.a_dtype)

    def bakes_sm_count(self, config: Config) -> bool:
        params = config.as_dict()
        return params["kernel"] in ("sm90", "sm100_fused") or params.get("scheduler") == "static"

    def cta_tile(self, config: Config) -> tuple[int, int]:
        rows, columns = super().cta_tile(config)
        # A pair of CTAs shares one MMA tile, half of its rows each.
        return (rows // 2 if config.as_dict().get("two_cta") else rows), columns

    def estimate_us(self, config: Config, problem: Problem, target: Target) -> float:
        if config["kernel"] == "sm100_tgv" and problem.m > rules.TGV_TOKEN_TILES * self.cta_tile(config)[1]:
            # It can't be launched so; an entry never serves an m above the one that it was made for.
            return math.inf
        return super().estimate_us(config, problem, target)
