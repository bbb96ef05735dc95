"""Kernel families: where kernels come from."""
