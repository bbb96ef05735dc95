"""A forward pass written down operation by operation, and what it does to the outputs of the GEMMs in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from gemmcache.models.after import After
from gemmcache.models.values import Source, Value, elementwise

_aten = torch.ops.aten
#: Operations that keep values and their order where they keep their number: views, copies, casts.
_TRANSPARENT = frozenset(
    {_aten.view, _aten._unsafe_view, _aten.reshape, _aten._reshape_alias, _aten.unsqueeze, _aten.squeeze}
    | {_aten.expand, _aten.slice, _aten.clone, _aten._to_copy, _aten.alias, _aten.detach, _aten.lift_fresh}
)
#: Operations that keep values in another order. Swapped back, they still count as moved.
_MOVES = frozenset({_aten.transpose, _aten.permute, _aten.t})
_SPLITS = frozenset({_aten.split, _aten.split_with_sizes})
_ADDS = frozenset({_aten.add.Tensor, _aten.add_.Tensor})


@dataclass(slots=True)
class _Node:
    """A tensor as one operation left it, and the nodes of what later operations make of it.

    `same` is the first node with the same values in the same order and dtype.
    """

    same: int
    value: Value | None = None
    readers: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Run:
    """One call of the module at `paths`, its output (node, number of columns, dtype), and the node that it reads."""

    paths: tuple[str, ...]
    node: int
    n: int
    dtype: torch.dtype
    reads: int


@dataclass(frozen=True, slots=True)
class _Match:
    """The node `end` is `after` of a run's output; `other` is the node that it takes besides, if any."""

    end: int
    after: After
    other: int | None = None


@dataclass(frozen=True, slots=True)
class _Call:
    """An operation on tensors, and the nodes that these were before it."""

    func: Any
    args: Any
    kwargs: Any
    inputs: list[torch.Tensor]
    nodes: list[int]


class Recorder(TorchDispatchMode):
    """Writes down what runs inside, on the meta device: nothing is computed.

    `gemm` names the outputs of GEMMs, `read` the outputs of the model; `after` then says what comes after each.
    Questions about the numbers in meta tensors (`.item()`, truth, `nonzero`) are answered with yes, 1 and one
    row: models ask them about packing, overflow and routing, which are not what this is about.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._nodes: list[_Node] = []
        self._of: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # an id is a name only while its tensor lives
        self._runs: list[_Run] = []
        self._opaque: set[str] = set()
        self._matches: dict[int, list[_Match]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        if inputs and inputs[0].is_meta and func.overloadpacket in (_aten._local_scalar_dense, _aten.nonzero):
            self.read(inputs)
            return _answer(func.overloadpacket, inputs[0])
        out = func(*args, **kwargs)
        outputs = _tensors(out)
        if not outputs:
            self.read(inputs)
            return out
        call = _Call(func, args, kwargs, inputs, [self._node(t) for t in inputs])
        for i, tensor in enumerate(outputs):
            node = self._new(tensor, self._value(call, tensor, i))
            self._nodes[node].same = self._same(call, node, tensor)
            for before in call.nodes:
                self._nodes[before].readers.add(node)
            self._match(call, node, tensor)
            self._of[id(tensor)] = node  # after an operation in place, the same tensor is another node
        return out

    def gemm(self, paths: Iterable[str], a: torch.Tensor, out: torch.Tensor) -> None:
        """`out[..., N]` is the output of the GEMM at `paths` (several where layers share a module) for `a[..., K]`."""
        node, run = self._node(out), len(self._runs)
        reads = self._nodes[self._node(a)].same
        self._runs.append(_Run(tuple(paths), node, out.shape[-1], out.dtype, reads))
        with _disable_current_modes():  # a hook calls this, inside the forward pass
            self._nodes[node].value = Value.of(Source(run))

    def opaque(self, paths: Iterable[str]) -> None:
        """The module at `paths` ran and does more than a GEMM: nothing is known of what comes after that."""
        self._opaque.update(paths)

    def read(self, outputs: Any) -> None:
        """The tensors anywhere in `outputs` are read by someone outside."""
        reader = len(self._nodes)
        self._nodes.append(_Node(reader))
        for tensor in _tensors(outputs):
            self._nodes[self._node(tensor)].readers.add(reader)

    def after(self) -> dict[str, After]:
        """Path -> what all its runs have after them, and what they read; runs that differ have nothing after them."""
        found = dict.fromkeys(self._opaque, After())
        for number, run in enumerate(self._runs):
            after = self._after(number)
            for path in run.paths:
                before = found.get(path, after)
                found[path] = replace(after if before == after else After(), reads=(*before.reads, run.reads))
        return found

    def _new(self, tensor: torch.Tensor, value: Value | None = None) -> int:
        node = len(self._nodes)
        self._nodes.append(_Node(node, value))
        self._alive.append(tensor)
        return node

    def _node(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self._of:
            self._of[id(tensor)] = self._new(tensor)
        return self._of[id(tensor)]

    def _same(self, call: _Call, node: int, out: torch.Tensor) -> int:
        """The first node with the values of `out`, which is `node`."""
        if call.func.overloadpacket not in _TRANSPARENT or len(call.inputs) != 1:
            return node
        first = call.inputs[0]
        same = out.numel() == first.numel() and out.dtype == first.dtype
        return self._nodes[call.nodes[0]].same if same else node

    def _value(self, call: _Call, out: torch.Tensor, i: int) -> Value | None:
        """The value of `out`, the i-th output of a call; None where it is no function of GEMM outputs."""
        values = {}
        for tensor, node in zip(call.inputs, call.nodes, strict=True):
            value = self._nodes[node].value
            if value is None:
                return None
            values[id(tensor)] = value
        if not values:
            return None
        packet, first = call.func.overloadpacket, call.inputs[0]
        if packet in _TRANSPARENT and out.numel() == first.numel():
            return values[id(first)]
        if packet in _MOVES:
            return replace(values[id(first)], moved=True)
        if packet in _SPLITS or packet is _aten.slice:
            return self._half(call, values[id(first)], out, i)
        if torch.Tag.pointwise in call.func.tags:
            return elementwise(call.func, call.args, call.kwargs, values)
        return None

    def _half(self, call: _Call, value: Value, out: torch.Tensor, i: int) -> Value | None:
        """The value of one half of the columns of a GEMM's output."""
        run, whole = value.whole, call.inputs[0]
        if run is None or value.moved or not value.is_source() or call.kwargs:
            return None
        n, args = whole.shape[-1], call.args
        if call.func.overloadpacket is _aten.slice:  # (whole, dim, start, end)
            dim, start = (args[1] if len(args) > 1 else 0), (args[2] if len(args) > 2 else None) or 0
            start += n if start < 0 else 0
        else:  # (whole, sizes, dim)
            dim, start = (args[2] if len(args) > 2 else 0), i * (n // 2)
        if dim % whole.dim() != whole.dim() - 1 or n != self._runs[run].n or 2 * out.shape[-1] != n:
            return None
        return Value.of(Source(run, 2 * start // n)) if start in (0, n // 2) else None

    def _match(self, call: _Call, node: int, out: torch.Tensor) -> None:
        """Notes what the output of a call is, of which GEMM's output."""
        value = self._nodes[node].value
        if value is not None and torch.Tag.pointwise in call.func.tags:
            activation, gated = value.activation(), None if value.moved else value.gate()
            if activation and value.whole is not None:
                self._matches[value.whole].append(_Match(node, After(activation)))
            if gated:
                name, gate, up = gated
                if gate.half is None and up.half is None:
                    own, other = self._runs[gate.run], self._runs[up.run]
                    if (own.n, own.reads) == (other.n, other.reads):  # as one weight they have one input
                        self._matches[gate.run].append(_Match(node, After(name, times=other.paths[0]), other.node))
                elif gate.run == up.run and (gate.half, up.half) == (0, 1):
                    self._matches[gate.run].append(_Match(node, After(gate=name)))
        if call.func in _ADDS and call.kwargs.get("alpha", 1) == 1 and len(call.inputs) == 2:
            self._match_residual(call, node, out)

    def _match_residual(self, call: _Call, node: int, out: torch.Tensor) -> None:
        """A sum of a GEMM's output, activated or not, and a tensor of its shape and dtype.

        Of two outputs, the later takes it.
        """
        found: list[tuple[int, _Match]] = []
        if call.inputs[0].shape == call.inputs[1].shape:
            for operand, other in (call.nodes, call.nodes[::-1]):
                value = self._nodes[operand].value
                run = value.whole if value else None
                if value is None or run is None or value.moved or out.shape[-1] != self._runs[run].n:
                    continue
                if {self._runs[run].dtype} != {t.dtype for t in (*call.inputs, out)}:
                    continue
                activation = value.activation()
                if activation or value.is_source():
                    found.append((run, _Match(node, After(activation, residual=True), other)))
        if found:
            run, match = max(found, key=lambda f: f[0])
            self._matches[run].append(match)

    def _after(self, number: int) -> After:
        """The longest match that leaves nothing of a run's output to other readers."""
        times = None
        for match in sorted(self._matches[number], key=lambda m: m.end, reverse=True):
            inside = self._inside(self._runs[number].node, match.end)
            if inside is None or match.other in inside:
                continue
            if match.after.times is None:
                return replace(match.after, times=times)
            # The activation by itself is a match of its own, with an earlier end.
            if match.other is not None and self._inside(match.other, match.end) is not None:
                times = match.after.times
        return After()

    def _inside(self, start: int, end: int) -> set[int] | None:
        """The nodes from `start` to before `end`, if these have values and lead nowhere but to `end`."""
        seen, waiting = {start}, [start]
        while waiting:
            node = self._nodes[waiting.pop()]
            if node.value is None or not node.readers:
                return None
            waiting.extend(node.readers - seen - {end})
            seen |= node.readers - {end}
        return seen


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _answer(packet: Any, tensor: torch.Tensor) -> Any:
    if packet is _aten.nonzero:
        return tensor.new_empty((1, tensor.dim()), dtype=torch.int64)
    return True if tensor.dtype == torch.bool else 1.0 if tensor.dtype.is_floating_point else 1
