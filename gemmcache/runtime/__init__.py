"""Serving kernels from a bundle, with no compiler and no tuner."""
