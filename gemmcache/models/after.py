"""What a model does with the output of a GEMM before anything else reads it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class After:
    """The steps between a GEMM's output (bias added) and the first tensor that other operations read.

    `activation` and `residual` are steps of an epilogue, in this order. `times` is the path of the GEMM whose
    output the activated one is multiplied by, which has the same input, and which nothing else reads. `gate`
    is the activation where the weight itself holds both, [gate; up], and the model multiplies act(gate) by up.

    `reads` says what the GEMM itself reads, a number for each of its runs: those of one forward pass are the
    same for GEMMs of the same input. Empty where that was not watched.
    """

    activation: str | None = None
    residual: bool = False
    gate: str | None = None
    times: str | None = None
    reads: tuple[int, ...] = field(default=(), compare=False)
