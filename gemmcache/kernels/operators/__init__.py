"""The kernels of nvidia-cutlass-operators for sm_80, sm_90a and sm_100a, behind the uniform entry ABI."""

from gemmcache.kernels.operators.family import OperatorsFamily

__all__ = ["OperatorsFamily"]
