"""The call that serves a layer: guards, dispatch, kernel or library."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gemmcache import library
from gemmcache.dtypes import SIZES, accumulator_for
from gemmcache.epilogue import Epilogue
from gemmcache.errors import DeviceError, MissError, UsageError
from gemmcache.problem import ProblemFamily
from gemmcache.runtime.counters import Counters
from gemmcache.runtime.devices import CudaDevices
from gemmcache.runtime.dispatch import Choice, Dispatcher
from gemmcache.runtime.guards import matrix_flaw, overlaps_itself

_NAMES = {getattr(torch, name): name for name in SIZES}
_UNKNOWN_FAMILY = Choice(None, None, "family")
Function = Callable[..., Any]


class Linear:
    """`out = residual + activation(x @ w.T + bias)`, served from a bundle's dispatch tables.

    Called with x[..., K], w[N, K], bias[N], residual[..., N], out[..., N]; out is returned, made if not given.
    The result has x's dtype. Every call is counted once. Anything outside a kernel's declared limits goes to the
    library and gives what torch gives: empty operands, other layouts, gradients, autocast, other devices.

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
        self._by_call: dict[tuple[object, ...], tuple[ProblemFamily, Dispatcher | None]] = {}

    def __call__(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        shape = x.shape
        if w.dim() != 2 or not shape or shape[-1] != w.shape[1]:
            raise UsageError(f"x{list(shape)} and w{list(w.shape)} do not fit", remedy="x[..., K] and w[N, K]")
        n, k = w.shape
        wide = (*shape[:-1], n)
        for name, tensor, expected in (("bias", bias, (n,)), ("residual", residual, wide), ("out", out, wide)):
            if tensor is not None and tuple(tensor.shape) != expected:
                raise UsageError(f"{name}{list(tensor.shape)} does not fit, expected {list(expected)}")
        if out is not None and out.dtype != x.dtype:
            raise UsageError(f"out has dtype {out.dtype}, x has {x.dtype}")
        if torch.compiler.is_compiling():
            # A traced graph holds the library's ops; counting would not survive tracing.
            return _library(x, w, bias, activation, residual, out)
        if 0 in shape or n == 0:
            self._counters.fallbacks["empty"].hit()
            return _library(x, w, bias, activation, residual, out)

        x2 = x if x.dim() == 2 else x.reshape(-1, k)
        key = (n, k, x.dtype, w.dtype, bias is None, activation, residual is None)
        found = self._by_call.get(key)
        if found is None:
            found = self._remember(key, x, w, bias, activation, residual)
        family, dispatcher = found
        choice = _UNKNOWN_FAMILY if dispatcher is None else dispatcher.choose(x2.shape[0])
        if choice.function is None:
            if choice.entry is not None:
                self._counters.library.hit()
            else:
                self._counters.misses[choice.where].hit()
                if self._raise_on_miss:
                    raise MissError(
                        f"the bundle has no entry for {family.at(x2.shape[0])} ({choice.where})",
                        remedy="tune and build it, or load with on_miss='library'",
                    )
            return _library(x, w, bias, activation, residual, out)

        out2 = x2.new_empty((x2.shape[0], n)) if out is None else _as_matrix(out, n)
        flaw = self._flaw(choice, x2, w, bias, residual, out2)
        if flaw is not None or out2 is None:
            self._counters.fallbacks[flaw or "out"].hit()
            return _library(x, w, bias, activation, residual, out)
        if self.forked:
            raise DeviceError(
                "this process was forked after the bundle was loaded",
                remedy="start workers with 'spawn', or load in them",
            )
        operands = [t if t.dim() == 1 else t.reshape(-1, n) for t in (bias, residual) if t is not None]
        self._counters.kernel.hit()
        if self._on.is_current(x2.device):
            choice.function(x2, w, out2, *operands)
        else:
            with self._on.made_current(x2.device):
                choice.function(x2, w, out2, *operands)
        if out is not None:
            return out
        return out2 if x.dim() == 2 else out2.view(wide)

    def _remember(
        self,
        key: tuple[object, ...],
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
    ) -> tuple[ProblemFamily, Dispatcher | None]:
        """The family of a call and its dispatcher. Raises `UsageError` for dtypes or activations not known."""
        for name, tensor in (("x", x), ("w", w)):
            if tensor.dtype not in _NAMES:
                raise UsageError(f"{name} has dtype {tensor.dtype}", remedy=f"one of {', '.join(SIZES)}")
        a = _NAMES[x.dtype]
        family = ProblemFamily(
            n=w.shape[0],
            k=w.shape[1],
            a_dtype=a,
            b_dtype=_NAMES[w.dtype],
            out_dtype=a,
            acc_dtype=accumulator_for(a),
            epilogue=Epilogue(bias=bias is not None, activation=activation, residual=residual is not None),
        )
        found = (family, self._families.get(family))
        self._by_call[key] = found
        return found

    def _flaw(
        self, choice: Choice, x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor | None
    ) -> str | None:
        """The name of the fallback counter that keeps this call from the kernel, None if nothing does."""
        if out is None:
            return "out"
        tensors = [t for t in (x, w, out, bias, residual) if t is not None]
        device = x.device
        if not self._on.serves(device) or any(t.device != device for t in tensors):
            return "device"
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return "autograd"
        if torch.is_autocast_enabled(self._on.type):
            return "autocast"
        if w.shape[0] % choice.divisibility or w.shape[1] % choice.divisibility:
            return "divisibility"
        for tensor in tensors:
            if tensor.dim() == 1:
                if tensor.dtype != x.dtype or tensor.stride(0) != 1 or tensor.data_ptr() % choice.align_bytes:
                    return "alignment"
                continue
            matrix = tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])
            flaw = matrix_flaw(matrix, choice.divisibility, choice.align_bytes)
            if flaw is not None:
                return flaw
        return None

    def warm_up(self) -> int:
        """Launches each kernel once; see `Bundle.warm_up`."""
        done: set[str] = set()
        for dispatcher in self._families.values():
            family = dispatcher.family
            if family.epilogue:
                continue
            for entry in dispatcher.table.entries:
                choice = dispatcher.choose(entry.m)
                if choice.function is None or entry.kernel is None or entry.kernel in done:
                    continue
                dtypes = [getattr(torch, d) for d in (family.a_dtype, family.b_dtype, family.out_dtype)]
                # n and k are dynamic: the smallest that the kernel takes will do.
                size = choice.divisibility * 8
                a, b, out = (
                    torch.zeros(r, size, dtype=d, device=self._on.type)
                    for r, d in zip((1, size, 1), dtypes, strict=True)
                )
                choice.function(a, b, out)
                done.add(entry.kernel)
        torch.cuda.synchronize()
        return len(done)


def _as_matrix(out: Tensor, n: int) -> Tensor | None:
    """A 2-D view of out, None if it has none or overlaps itself: a copy would be written and lost."""
    try:
        matrix = out if out.dim() == 2 else out.view(-1, n)
    except RuntimeError:
        return None
    return None if overlaps_itself(matrix) else matrix


def _library(
    x: Tensor, w: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None, out: Tensor | None
) -> Tensor:
    """What torch gives for the call, with autograd where it is on."""
    if activation is None and residual is None and out is None:
        return torch.nn.functional.linear(x, w, bias)
    n, k = w.shape
    rows = math.prod(x.shape[:-1])
    operands = {}
    if bias is not None:
        operands["bias"] = bias
    if residual is not None:
        operands["residual"] = residual.reshape(rows, n)
    epilogue = Epilogue(bias=bias is not None, activation=activation, residual=residual is not None)
    result = library.library_op(epilogue, x.dtype, x.reshape(rows, k), w, operands)
    result = result.reshape(*x.shape[:-1], n)
    return result if out is None else out.copy_(result)
