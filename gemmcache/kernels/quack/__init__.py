"""The kernels of quack-kernels for sm_90a, behind the uniform entry ABI."""

from gemmcache.kernels.quack.family import QuackFamily

__all__ = ["QuackFamily"]
