"""The epilogue of a GEMM as a canonical list of steps, part of every key.

With `acc = a @ b.T` in the accumulator dtype, the steps apply in this order, whichever are present::

    scale        acc * scale_a * scale_b      per tensor, per row of a, per column of out (row of b)
    bias         + bias[N]                    a row vector
    activation   relu | gelu | gelu_tanh | silu
    gate         swiglu | geglu               act(acc[:, :N/2]) * acc[:, N/2:], the weight holds [gate; up]
                                              halves; act is silu for swiglu, gelu (erf) for geglu
    residual     + beta * residual[M, N]      beta is 1 unless written as residual*BETA

and the result is rounded once to the out dtype. `Epilogue.parse("bias+gelu_tanh")` reads the text form,
`str()` gives it back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gemmcache.errors import UsageError

SCALES = ("tensor", "row", "column", "row_column")
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
GATES = ("swiglu", "geglu")

_BETA = re.compile(r"-?(0|[1-9][0-9]{0,5})(\.[0-9]{0,8}[1-9])?")


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What happens to the accumulator before it is stored. The default does nothing.

    `beta` is a canonical decimal text (no trailing zeros, no exponent), since keys hold no floats.
    """

    scale: str | None = None
    bias: bool = False
    activation: str | None = None
    gate: str | None = None
    residual: bool = False
    beta: str = "1"

    def __post_init__(self) -> None:
        for value, allowed, name in (
            (self.scale, SCALES, "scale"),
            (self.activation, ACTIVATIONS, "activation"),
            (self.gate, GATES, "gate"),
        ):
            if value is not None and value not in allowed:
                raise UsageError(f"epilogue {name} '{value}' is not known", remedy=f"one of {', '.join(allowed)}")
        if self.activation and self.gate:
            raise UsageError("an epilogue has an activation or a gate, not both")
        if not _BETA.fullmatch(self.beta) or self.beta == "-0":
            raise UsageError(f"residual factor '{self.beta}' is not a plain decimal", remedy="for example 0.5")
        if not self.residual and self.beta != "1":
            raise UsageError("a residual factor needs a residual")

    @classmethod
    def parse(cls, text: str) -> Epilogue:
        """Reads steps joined by `+`, in any order; `none` or the empty text for no epilogue.

        Steps: `scale_tensor`, `scale_row`, `scale_column`, `scale_row_column`, `bias`, an activation, a
        gate, `residual` or `residual*BETA`. The order they are written in changes nothing.
        Raises `UsageError` for an unknown or repeated step.
        """
        fields: dict[str, object] = {}

        def put(name: str, value: object) -> None:
            if name in fields:
                raise UsageError(f"epilogue '{text}' has two steps of the kind '{name}'")
            fields[name] = value

        for step in (s.strip() for s in text.split("+")):
            if step in ("", "none"):
                if text.strip() not in ("", "none"):
                    raise UsageError(f"epilogue '{text}' has an empty step")
            elif step.startswith("scale_"):
                put("scale", step.removeprefix("scale_"))
            elif step == "bias":
                put("bias", True)
            elif step in ACTIVATIONS:
                put("activation", step)
            elif step in GATES:
                put("gate", step)
            elif step == "residual" or step.startswith("residual*"):
                put("residual", True)
                fields["beta"] = step.partition("*")[2] if "*" in step else "1"
            else:
                steps = ", ".join(["scale_...", "bias", *ACTIVATIONS, *GATES, "residual"])
                raise UsageError(f"epilogue step '{step}' is not known", remedy=f"one of {steps}")
        return cls(**fields)  # type: ignore[arg-type]

    def __str__(self) -> str:
        steps = [
            f"scale_{self.scale}" if self.scale else "",
            "bias" if self.bias else "",
            self.activation or "",
            self.gate or "",
            ("residual" if self.beta == "1" else f"residual*{self.beta}") if self.residual else "",
        ]
        return "+".join(s for s in steps if s) or "none"

    def __bool__(self) -> bool:
        return self != Epilogue()

    def operands(self) -> tuple[str, ...]:
        """Names of the tensors that a kernel with this epilogue takes after `out`, in the ABI's order."""
        scales = {
            "tensor": ("scale_a", "scale_b"),
            "row": ("scale_a",),
            "column": ("scale_b",),
            "row_column": ("scale_a", "scale_b"),
        }
        names = scales[self.scale] if self.scale else ()
        return names + (("bias",) if self.bias else ()) + (("residual",) if self.residual else ())

    def out_columns(self, n: int) -> int:
        """Columns of out for a weight of `n` rows: half of them under a gate."""
        if self.gate and n % 2:
            raise UsageError(f"a gated epilogue needs an even n, not {n}")
        return n // 2 if self.gate else n
