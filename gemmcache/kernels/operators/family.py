"""The kernel family `operators`."""

from __future__ import annotations

from gemmcache.kernels.dense import DenseFamily
from gemmcache.kernels.interface import Config
from gemmcache.kernels.operators.space import FAMILY, SPACES


class OperatorsFamily(DenseFamily):
    """nvidia-cutlass-operators: out = a @ b.T, without epilogue."""

    name = FAMILY
    package = "nvidia-cutlass-operators"
    sources = "cutlass/operators/"
    extra = "build"
    spaces = SPACES
    epilogues = ("none",)
    entry_module = "gemmcache.kernels.operators.entry"

    def bakes_sm_count(self, config: Config) -> bool:
        params = config.as_dict()
        return params["kernel"] == "sm90" or params.get("scheduler") == "static"

    def cta_tile(self, config: Config) -> tuple[int, int]:
        rows, columns = super().cta_tile(config)
        # A pair of CTAs shares one MMA tile, half of its rows each.
        return (rows // 2 if config.as_dict().get("two_cta") else rows), columns
