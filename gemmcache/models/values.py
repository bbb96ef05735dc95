"""Values: an elementwise function of one or two GEMM outputs, known by what it gives at a few points.

The points of an output are random, of its own, and on both sides far from zero. So a value tells an activation,
however the model spells it, from what only looks like one: a clipped one, or one with another constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

#: The activations that epilogues know.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.nn.functional.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}
_TAILS = (-70.0, -30.0, -11.0, -7.0, 7.0, 11.0, 30.0, 70.0)
_NEAR = 24


@dataclass(frozen=True, slots=True)
class Source:
    """The output of a GEMM, by the number of its run, or one half of its columns: 0 or 1."""

    run: int
    half: int | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """`points` (float64, on the CPU) is a function of the points of `sources`.

    `moved`: the elements are in another order than those of the sources. What puts them together with another
    tensor makes other pairs than an epilogue does.
    """

    sources: tuple[Source, ...]
    points: torch.Tensor
    moved: bool = False

    @classmethod
    def of(cls, source: Source) -> Value:
        """The source itself."""
        # The device is named: a forward pass on the meta device makes that the default.
        generator = torch.Generator("cpu").manual_seed(3 * source.run + (0 if source.half is None else 1 + source.half))
        near = 3 * torch.randn(_NEAR, generator=generator, dtype=torch.float64, device="cpu")
        tails = torch.tensor(_TAILS, dtype=torch.float64, device="cpu")
        order = torch.randperm(len(_TAILS), generator=generator, device="cpu")
        return cls((source,), torch.cat([near, tails[order]]))

    @property
    def whole(self) -> int | None:
        """The run whose whole output this is a function of, and of nothing else; None for any other."""
        return self.sources[0].run if len(self.sources) == 1 and self.sources[0].half is None else None

    def is_source(self) -> bool:
        """Whether this is a source as it is."""
        return len(self.sources) == 1 and _close(self.points, Value.of(self.sources[0]).points)

    def activation(self) -> str | None:
        """The activation that this is, of the whole output of a GEMM."""
        return None if self.whole is None else _activation(self.points, Value.of(self.sources[0]).points)

    def gate(self) -> tuple[str, Source, Source] | None:
        """(activation, gate, up) where this is activation(gate) * up, of two sources."""
        if len(self.sources) == 2:
            for gate, up in (self.sources, self.sources[::-1]):
                activation = _activation(self.points, Value.of(gate).points, Value.of(up).points)
                if activation:
                    return activation, gate, up
        return None


def elementwise(func: Any, args: Any, kwargs: Any, values: Mapping[int, Value]) -> Value | None:
    """The value of an elementwise operation on tensors with `values` (by id); None for more than two sources."""
    sources = tuple(dict.fromkeys(source for value in values.values() for source in value.sources))
    if len(sources) > 2:
        return None

    def at(x: Any) -> Any:  # a copy, for operations in place
        return values[id(x)].points.clone() if isinstance(x, torch.Tensor) else x

    try:
        points = func(*tree_map(at, args), **tree_map(at, kwargs))
    except (RuntimeError, TypeError, NotImplementedError):  # not for float64, or not on the CPU
        return None
    return Value(sources, points, any(value.moved for value in values.values()))


def _activation(points: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | float = 1.0) -> str | None:
    found = (name for name, function in ACTIVATIONS.items() if _close(points, function(gate) * up))
    return next(found, None)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-6, atol=1e-6)
