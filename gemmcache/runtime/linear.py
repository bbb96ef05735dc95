"""The call that serves a layer: guards, dispatch, kernel or library."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from gemmcache import library
from gemmcache.dtypes import SIZES, accumulator_for
from gemmcache.epilogue import ACTIVATIONS, Epilogue
from gemmcache.errors import DeviceError, MissError, UsageError
from gemmcache.ladder import BETWEEN
from gemmcache.problem import ProblemFamily
from gemmcache.runtime.counters import Counters
from gemmcache.runtime.devices import CudaDevices
from gemmcache.runtime.dispatch import Choice, Dispatcher
from gemmcache.runtime.guards import MAX_ELEMENTS, as_matrix, matrix_flaw, overlap, overlaps_itself

_NAMES = {getattr(torch, name): name for name in SIZES}
_PLAIN = (Tensor, Parameter)
_UNKNOWN_FAMILY = Choice(None, None, "family")

_linear = torch.nn.functional.linear
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_autocast_enabled = torch.is_autocast_enabled


class Linear:
    """`out = residual + activation(x @ w.T + bias)`, served from a bundle's dispatch tables.

    Called with x[..., K], w[N, K], bias[N], residual[..., N], out[..., N]; out is returned, made if not given.
    The result has x's dtype. Every call is counted once. Anything outside a kernel's declared limits goes to the
    library and gives what torch gives: empty operands, other layouts and dtypes, gradients, autocast, other devices.

    Raises `UsageError` for shapes that do not fit, `MissError` for a problem without an entry if the bundle was
    loaded so, `DeviceError` in a process forked after loading.
    """

    def __init__(
        self,
        dispatchers: Mapping[ProblemFamily, Dispatcher],
        counters: Counters,
        devices: CudaDevices,
        raise_on_miss: bool,
    ) -> None:
        self.forked = False
        self._counters = counters
        self._on = devices
        self._raise_on_miss = raise_on_miss
        self._families = dict(dispatchers)
        # Keyed by what a call gives, so that no family has to be made and hashed for each.
        self._by_call: dict[tuple[object, ...], tuple[ProblemFamily | None, Dispatcher | None]] = {}
        # (n, k, dtype of x, dtype of w) -> m -> the entry's choice, for calls without epilogue that were seen before.
        self._plain: dict[tuple[object, ...], dict[int, Choice]] = {}

    def __call__(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if bias is None and activation is None and residual is None and out is None:
            served = self._serve_plain(x, w)
            if served is not None:
                return served
        return self._serve(x, w, bias, activation, residual, out)

    def _serve_plain(self, x: Tensor, w: Tensor) -> Tensor | None:
        """The short way for what engines call all day: an entry, 2-D operands, no epilogue. None if anything about
        the call is not as plain as that; the long way then finds out what. Both apply the same limits.
        """
        if type(x) not in _PLAIN or type(w) not in _PLAIN or _is_compiling() or x.dim() != 2 or w.dim() != 2:
            return None
        m, k = x.shape
        n, w_k = w.shape
        known = self._plain.get((n, k, x.dtype, w.dtype))
        choice = None if known is None else known.get(m)
        if choice is None or k != w_k:
            return None
        if choice.function is None:
            self._counters.library.hit()
            return _linear(x, w)
        x_row, x_column = x.stride()
        w_row, w_column = w.stride()
        divisor, align, device = choice.divisibility, choice.align_bytes, x.device
        if (
            x_column != 1
            or w_column != 1
            or x_row < k
            or w_row < k
            or x_row % divisor
            or w_row % divisor
            or m * x_row >= MAX_ELEMENTS
            or n * w_row >= MAX_ELEMENTS
            or m * n >= MAX_ELEMENTS
            or w.device != device
            or not self._on.serves(device)
            or not self._on.is_current(device)
            or (_is_grad_enabled() and (x.requires_grad or w.requires_grad))
            or _is_autocast_enabled(self._on.type)
            or self.forked
        ):
            return None
        try:
            if x.data_ptr() % align or w.data_ptr() % align:
                return None
        except RuntimeError:
            # A tensor without storage, as under vmap.
            return None
        out = x.new_empty((m, n))
        self._counters.kernel.hit()
        choice.function(x, w, out)
        return out

    def _serve(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        n, wide = _check(x, w, bias, activation, residual, out)
        if _is_compiling():
            # A traced graph holds the library's ops; counting would not survive tracing.
            return _library(x, w, bias, activation, residual, out)
        if 0 in x.shape or n == 0:
            self._counters.fallbacks["empty"].hit()
            return _library(x, w, bias, activation, residual, out)

        k = w.shape[1]
        m = x.numel() // k
        key = (n, k, x.dtype, w.dtype, bias is None, activation, residual is None)
        found = self._by_call.get(key)
        if found is None:
            found = self._remember(key, x, w, bias, activation, residual)
        family, dispatcher = found
        choice = _UNKNOWN_FAMILY if dispatcher is None else dispatcher.choose(m)
        if choice.function is None:
            if choice.entry is not None:
                self._counters.library.hit()
                if bias is None and activation is None and residual is None:
                    self._plain.setdefault((n, k, x.dtype, w.dtype), {})[m] = choice
            elif choice.where == BETWEEN:
                self._counters.between.hit()
            else:
                self._miss(choice, f"{m}x{family or f'{n}x{k} {x.dtype}'}")
            return _library(x, w, bias, activation, residual, out)

        flaw = self._flaw(choice, x, w, bias, residual, out)
        if flaw is not None:
            self._counters.fallbacks[flaw].hit()
            return _library(x, w, bias, activation, residual, out)
        if self.forked:
            raise DeviceError(
                "this process was forked after the bundle was loaded",
                remedy="start workers with 'spawn', or load in them",
            )
        a = x if x.dim() == 2 else x.reshape(m, k)
        result = a.new_empty((m, n)) if out is None else out.view(m, n)
        operands = [t for t in (bias, None if residual is None else residual.reshape(m, n)) if t is not None]
        self._counters.kernel.hit()
        if self._on.is_current(x.device):
            choice.function(a, w, result, *operands)
        else:
            with self._on.made_current(x.device):
                choice.function(a, w, result, *operands)
        if not operands and activation is None:
            self._plain.setdefault((n, k, x.dtype, w.dtype), {})[m] = choice
        if out is not None:
            return out
        return result if x.dim() == 2 else result.view(wide)

    def _miss(self, choice: Choice, problem: str) -> None:
        self._counters.misses[choice.where].hit()
        if self._raise_on_miss:
            raise MissError(
                f"the bundle has no entry for {problem} ({choice.where})",
                remedy="tune and build it, or load with on_miss='library'",
            )

    def _remember(
        self,
        key: tuple[object, ...],
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
    ) -> tuple[ProblemFamily | None, Dispatcher | None]:
        """The family of a call and its dispatcher; no family for dtypes that problems do not have."""
        a, b = _NAMES.get(x.dtype), _NAMES.get(w.dtype)
        family = None
        if a is not None and b is not None:
            family = ProblemFamily(
                n=w.shape[0],
                k=w.shape[1],
                a_dtype=a,
                b_dtype=b,
                out_dtype=a,
                acc_dtype=accumulator_for(a),
                epilogue=Epilogue(bias=bias is not None, activation=activation, residual=residual is not None),
            )
        found = (family, None if family is None else self._families.get(family))
        self._by_call[key] = found
        return found

    def _flaw(
        self, choice: Choice, x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor | None
    ) -> str | None:
        """The name of the fallback counter that keeps this call from the kernel, None if nothing does."""
        tensors = [t for t in (x, w, bias, residual, out) if t is not None]
        device = x.device
        if any(type(t) not in _PLAIN for t in tensors):
            return "subclass"
        if not self._on.serves(device) or any(t.device != device for t in tensors):
            return "device"
        if any(t.dtype != x.dtype for t in tensors if t is not w):
            return "dtype"
        if _is_grad_enabled() and any(t.requires_grad for t in tensors):
            return "autograd"
        if _is_autocast_enabled(self._on.type):
            return "autocast"
        n, k = w.shape
        if n % choice.divisibility or k % choice.divisibility:
            return "divisibility"
        if x.numel() // k * n >= MAX_ELEMENTS:
            return "size"
        try:
            return self._layout_flaw(choice, x, w, bias, residual, out)
        except RuntimeError:
            # A tensor without storage, as under vmap.
            return "subclass"

    def _layout_flaw(
        self, choice: Choice, x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor | None
    ) -> str | None:
        if bias is not None and (bias.stride(0) != 1 or bias.data_ptr() % choice.align_bytes):
            return "alignment"
        for tensor in (x, w, residual):
            if tensor is not None:
                matrix = as_matrix(tensor)
                # Without a 2-D view a copy will be made, which is in order.
                flaw = None if matrix is None else matrix_flaw(matrix, choice.divisibility, choice.align_bytes)
                if flaw is not None:
                    return flaw
        if out is None:
            return None
        target = as_matrix(out)
        # A copy would be written and lost; and a kernel writes while it still reads x and w.
        if target is None or overlaps_itself(target) or overlap(out, x) or overlap(out, w):
            return "out"
        if residual is not None and out is not residual and overlap(out, residual):
            return "out"
        return matrix_flaw(target, choice.divisibility, choice.align_bytes)

    def warm_up(self, device: torch.device) -> int:
        """Launches each kernel once on `device`; see `Bundle.warm_up`."""
        done: set[str] = set()
        with self._on.made_current(device):
            for dispatcher in self._families.values():
                for entry in dispatcher.table.entries:
                    choice = dispatcher.choose(entry.m)
                    if choice.function is not None and entry.kernel is not None and entry.kernel not in done:
                        choice.function(*_smallest_operands(dispatcher.family, choice, device))
                        done.add(entry.kernel)
            self._on.wait()
        return len(done)


def _check(
    x: Tensor, w: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None, out: Tensor | None
) -> tuple[int, tuple[int, ...]]:
    """(N, shape of the result). Raises `UsageError` if the operands do not fit together."""
    shape = tuple(x.shape)
    if w.dim() != 2 or not shape or shape[-1] != w.shape[1]:
        raise UsageError(f"x{list(shape)} and w{list(w.shape)} do not fit", remedy="x[..., K] and w[N, K]")
    n = w.shape[0]
    wide = (*shape[:-1], n)
    for name, tensor, expected in (("bias", bias, (n,)), ("residual", residual, wide), ("out", out, wide)):
        if tensor is not None and tuple(tensor.shape) != expected:
            raise UsageError(f"{name}{list(tensor.shape)} does not fit, expected {list(expected)}")
    if out is not None and out.dtype != x.dtype:
        raise UsageError(f"out has dtype {out.dtype}, x has {x.dtype}")
    if activation is not None and activation not in ACTIVATIONS:
        raise UsageError(f"activation '{activation}' is not known", remedy=f"one of {', '.join(ACTIVATIONS)}")
    return n, wide


def _smallest_operands(family: ProblemFamily, choice: Choice, device: torch.device) -> list[Tensor]:
    """Zeros of the smallest sizes that the kernel takes; n and k are dynamic."""
    size = choice.divisibility * 8
    shapes = {"bias": (size,), "residual": (1, size), "scale_a": (1,), "scale_b": (size,)}
    dtypes = [getattr(torch, d) for d in (family.a_dtype, family.b_dtype, family.out_dtype)]
    abc = [
        torch.zeros(s, dtype=d, device=device)
        for s, d in zip(((1, size), (size, size), (1, size)), dtypes, strict=True)
    ]
    scales = {"scale_a", "scale_b"}
    return abc + [
        torch.zeros(shapes[name], dtype=torch.float32 if name in scales else dtypes[2], device=device)
        for name in family.epilogue.operands()
    ]


def _library(
    x: Tensor, w: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None, out: Tensor | None
) -> Tensor:
    """What torch gives for the call, with autograd where it is on."""
    if activation is None and residual is None and out is None:
        return _linear(x, w, bias)
    n, k = w.shape
    rows = math.prod(x.shape[:-1])
    operands = {}
    if bias is not None:
        operands["bias"] = bias
    if residual is not None:
        operands["residual"] = residual.reshape(rows, n)
    epilogue = Epilogue(bias=bias is not None, activation=activation, residual=residual is not None)
    # Not in place where out is an operand too: the library may write while it still reads.
    apart = (
        out is not None and out.numel() and not any(t is not None and overlap(out, t) for t in (x, w, bias, residual))
    )
    target = as_matrix(out) if out is not None and apart else None
    result = library.library_op(epilogue, x.dtype, x.reshape(rows, k), w, operands, target)
    if out is None:
        return result.reshape(*x.shape[:-1], n)
    return out if target is not None else out.copy_(result.reshape(out.shape))
