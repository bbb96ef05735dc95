"""Kinds of calls: what they are told apart by, and what is remembered of them."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from gemmcache.runtime.call import Operands

V = TypeVar("V")

#: Types of tensors whose operators are torch's own.
PLAIN = (Tensor, Parameter)
Kind = tuple[Any, ...]


def kind_of(operands: Operands, activation: str | None, gate: str | None, out_dtype: torch.dtype | None) -> Kind | None:
    """All of a call that its decision depends on; None if it has to be made anew each time."""
    x, w, *others = operands
    if type(x) not in PLAIN or type(w) not in PLAIN:
        return None
    kind = (x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device)
    rest: list[Any] = [activation, gate, out_dtype]
    for tensor in others:
        if tensor is None:
            rest.append(None)
        elif type(tensor) in PLAIN:
            rest += tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        else:
            return None
    return (*kind, *rest) if any(word is not None for word in rest) else kind


class Recent(Generic[V]):
    """A dict of the `most` kinds used last, or up to twice as many. Without a lock: what a race loses is made anew.

    In two halves: when the young one is full it becomes the old one, and what is used again moves to the young one.
    Nothing is dropped that was used since, and no call pays for dropping the rest.
    """

    __slots__ = ("_most", "_old", "young")

    def __init__(self, most: int) -> None:
        self._most = most
        #: Of most calls the whole answer; `get` looks further.
        self.young: dict[Kind, V] = {}
        self._old: dict[Kind, V] = {}

    def __len__(self) -> int:
        return len(self.young.keys() | self._old.keys())

    def get(self, kind: Kind) -> V | None:
        found = self.young.get(kind)
        if found is None:
            found = self._old.get(kind)
            if found is not None:
                self.put(kind, found)
        return found

    def put(self, kind: Kind, value: V) -> None:
        if len(self.young) >= self._most:
            self._old, self.young = self.young, {}
        self.young[kind] = value
