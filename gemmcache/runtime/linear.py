"""The call that serves a layer: guards, dispatch, kernel or library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gemmcache.errors import DeviceError, MissError
from gemmcache.ladder import BETWEEN
from gemmcache.problem import ProblemFamily
from gemmcache.runtime.call import Form, Operands
from gemmcache.runtime.counters import Counters
from gemmcache.runtime.devices import CudaDevices
from gemmcache.runtime.dispatch import Choice, Dispatcher
from gemmcache.runtime.fallback import by_library, by_torch
from gemmcache.runtime.guards import has_tangent, is_tracing, is_watched, modes, transform
from gemmcache.runtime.kinds import PLAIN, Recent, kind_of
from gemmcache.runtime.launch import Launch, layouts_of, prepare, smallest_arguments

_UNKNOWN_FAMILY = Choice(None, None, "family")
#: Kinds of calls that are remembered, and up to twice as many; every m is one of its own. One takes 1.2 KB.
_MOST_KINDS = 1 << 15

_linear = torch.nn.functional.linear
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_autocast_enabled = torch.is_autocast_enabled


@dataclass(frozen=True, slots=True)
class Decision:
    """What all calls of one kind come to, as far as shapes, strides, dtypes and devices of their tensors decide."""

    form: Form
    #: None for the library.
    launch: Launch | None
    #: Raises the counter of what serves them.
    hit: Callable[[], object]
    #: The problem and the reason, for one without an entry.
    miss: str | None = None


class Linear:
    """`out = residual + act(scale_a * scale_b * (x @ w.T) + bias)`, served from a bundle's dispatch tables.

    Called with x[..., K], w[N, K], bias[N], residual[..., N'], out[..., N'], and an activation; or with a gate
    (`swiglu`, `geglu`), for which w holds the rows of gate and up one after the other and N' is N/2, not N. Scales are
    float32: one element each; or a scale_a of one a row of x, a scale_b of one a row of w, or both. With x[B, M, K] and
    w[B, N, K] it is a batch of products, which share scales and bias. out is returned, made if not given. Its dtype is
    `out_dtype`, else x's, else (for operands of 8 bits) bfloat16.

    Every call is counted once. Anything outside a kernel's declared limits goes to the library and gives what torch
    gives: empty operands, other layouts and dtypes, gradients, autocast, other devices, modes and transforms of torch.

    Raises `UsageError` for operands that do not fit, `MissError` for a problem without an entry if the bundle was
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
        # By all of a call that a decision depends on, so that nothing is derived and checked twice.
        self._decisions: Recent[Decision] = Recent(_MOST_KINDS)

    def __call__(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        *,
        gate: str | None = None,
        scale_a: Tensor | None = None,
        scale_b: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        plain = bias is None and activation is None and residual is None and out is None and gate is None
        if plain and scale_a is None and scale_b is None and out_dtype is None:
            served = self._serve_plain(x, w)
            if served is not None:
                return served
        operands = Operands(x, w, bias, residual, out, scale_a, scale_b)
        if _is_compiling():
            # A traced graph holds the library's ops; counting would not survive tracing.
            return by_library(Form.of(operands, activation, gate, out_dtype), operands)
        if is_watched() or getattr(x, "is_nested", False) or getattr(w, "is_nested", False):
            return by_torch(operands, activation, gate, out_dtype, self._counters.fallbacks["subclass"].hit)
        decision = self._decision(operands, activation, gate, out_dtype)
        if decision.launch is not None:
            return self._by_kernel(decision, decision.launch, operands)
        decision.hit()
        if decision.miss is not None and self._raise_on_miss:
            raise MissError(decision.miss, remedy="tune and build it, or load with on_miss='library'")
        return by_library(decision.form, operands)

    def _serve_plain(self, x: Tensor, w: Tensor) -> Tensor | None:
        """The short way for what engines call all day: an entry and 2-D operands alone, of a kind that was seen before.
        None if anything about the call is not as plain as that; the long way then finds out what.
        """
        # `is_watched`, without calling it.
        if type(x) not in PLAIN or type(w) not in PLAIN or _is_compiling() or modes() or transform() or is_tracing():
            return None
        try:
            device = x.device
            decision = self._decisions.young.get(
                (x.shape, x.stride(), x.dtype, device, w.shape, w.stride(), w.dtype, w.device)
            )
            if decision is None or decision.miss is not None:
                return None
            launch = decision.launch
            if launch is not None and (
                not launch.as_given
                or not (a := x.data_ptr())
                or not (b := w.data_ptr())
                or a % launch.align
                or b % launch.align
                or x.is_neg()
                or w.is_neg()
                or forward_ad._current_level >= 0
                or (_is_grad_enabled() and (x.requires_grad or w.requires_grad))
                or _is_autocast_enabled(self._on.type)
                or not self._on.is_current(device)
                or self.forked
            ):
                return None
        except RuntimeError:
            # A tensor without strides or without storage.
            return None
        if launch is None:
            if not decision.form.linear:
                return None
            decision.hit()
            return _linear(x, w)
        out = x.new_empty(launch.out_shape)
        decision.hit()
        launch.function(x, w, out)
        return out

    def _decision(
        self, operands: Operands, activation: str | None, gate: str | None, out_dtype: torch.dtype | None
    ) -> Decision:
        """What serves the call, remembered for calls like it."""
        try:
            key = kind_of(operands, activation, gate, out_dtype)
            found = None if key is None else self._decisions.get(key)
        except (RuntimeError, TypeError):
            # A tensor without strides, and words that are no words.
            key = found = None
        if found is None:
            found = self._decide(Form.of(operands, activation, gate, out_dtype), operands)
            if key is not None:
                self._decisions.put(key, found)
        return found

    def _by_kernel(self, decision: Decision, launch: Launch, operands: Operands) -> Tensor:
        """By the kernel, unless this very call's tensors or the state of torch keep it from it."""
        arguments: list[Tensor] | str
        if _is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
            arguments = "autograd"
        elif _is_autocast_enabled(self._on.type):
            arguments = "autocast"
        elif has_tangent(operands):
            arguments = "subclass"
        else:
            try:
                arguments = launch.arguments(operands)
            except RuntimeError:
                # A tensor without storage, as under vmap.
                arguments = "subclass"
        if isinstance(arguments, str):
            self._counters.fallbacks[arguments].hit()
            return by_library(decision.form, operands)
        if self.forked:
            raise DeviceError(
                "this process was forked after the bundle was loaded",
                remedy="start workers with 'spawn', or load in them",
            )
        x, out = operands.x, operands.out
        result = launch.new_out(x) if out is None else out.view(launch.out_shape)
        a, b, *rest = arguments
        decision.hit()
        if self._on.is_current(x.device):
            launch.function(a, b, result, *rest)
        else:
            with self._on.made_current(x.device):
                launch.function(a, b, result, *rest)
        if out is not None:
            return out
        return result if launch.result_shape is None else result.view(launch.result_shape)

    def _decide(self, form: Form, operands: Operands) -> Decision:
        """What serves calls like this one. The choice among kernels and the library depends on `form` alone."""
        counters = self._counters
        if form.empty:
            return Decision(form, None, counters.fallbacks["empty"].hit)
        family, dispatcher = self._look_up(form, operands)
        choice = _UNKNOWN_FAMILY if dispatcher is None else dispatcher.choose(form.m)
        if family is None or choice.function is None:
            if choice.entry is not None:
                return Decision(form, None, counters.library.hit)
            if choice.where == BETWEEN:
                return Decision(form, None, counters.between.hit)
            problem = f"{form.m}x{family or f'{form.n}x{form.k} {form.x_dtype}'}"
            miss = f"the bundle has no entry for {problem} ({choice.where})"
            return Decision(form, None, counters.misses[choice.where].hit, miss)
        launch = self._flaw(operands) or prepare(choice, family, form, operands)
        if isinstance(launch, str):
            return Decision(form, None, counters.fallbacks[launch].hit)
        return Decision(form, launch, counters.kernel.hit)

    def _look_up(self, form: Form, operands: Operands) -> tuple[ProblemFamily | None, Dispatcher | None]:
        """The family of a call and its dispatcher. Views of transposed matrices are a layout of their own where the
        bundle has a family of it; elsewhere they are operands with strides that no kernel takes."""
        layouts = layouts_of(form, operands)
        family = form.family(*layouts)
        if family is not None and family not in self._families and layouts != ("mk", "nk"):
            family = form.family()
        return family, None if family is None else self._families.get(family)

    def _flaw(self, operands: Operands) -> str | None:
        tensors = [t for t in operands if t is not None]
        device = operands.x.device
        if any(type(t) not in PLAIN for t in tensors):
            return "subclass"
        if not self._on.serves(device) or any(t.device != device for t in tensors):
            return "device"
        return None

    def warm_up(self, device: torch.device) -> int:
        """Launches each kernel once on `device`; see `Bundle.warm_up`."""
        done: set[str] = set()
        with self._on.made_current(device):
            for dispatcher in self._families.values():
                for entry in dispatcher.table.entries:
                    choice = dispatcher.choose(entry.m)
                    if choice.function is not None and entry.kernel is not None and entry.kernel not in done:
                        choice.function(*smallest_arguments(dispatcher.family, choice, device))
                        done.add(entry.kernel)
            self._on.wait()
        return len(done)
