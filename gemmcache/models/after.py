"""What a model does with the output of a GEMM before anything else reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class After:
    """The steps between a GEMM's output (bias added) and the first tensor that other operations read.

    `activation` and `residual` are steps of an epilogue, in this order. `times` is the path of the GEMM whose
    output the activated one is multiplied by, and which nothing else reads. `gate` is the activation where
    the weight itself holds both, [gate; up], and the model multiplies act(gate) by up.
    """

    activation: str | None = None
    residual: bool = False
    gate: str | None = None
    times: str | None = None
