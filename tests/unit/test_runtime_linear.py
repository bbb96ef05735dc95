"""`bundle.linear` with kernels that run on the CPU: dispatch, guards, counters, and torch's numbers throughout."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from gemmcache.bundle.interface import KERNEL, LIBRARY, TUNED, DispatchTable, Entry
from gemmcache.errors import DeviceError, MissError, UsageError
from gemmcache.problem import ProblemFamily
from gemmcache.runtime import linear as runtime_linear
from gemmcache.runtime.counters import Counters
from gemmcache.runtime.dispatch import Dispatcher
from gemmcache.runtime.linear import Linear

N, K = 32, 64
FAMILY = ProblemFamily.of(N, K)
BIASED = ProblemFamily.of(N, K, epilogue="bias+relu+residual")
RECORD = "9" * 64


class CpuDevices:
    """Two pretended devices, both of them the CPU; notes which one was current at each call."""

    type = "cpu"

    def __init__(self, current=True):
        self.current, self.log = current, []

    def serves(self, device):
        return device.type == "cpu"

    def is_current(self, device):
        return self.current

    def wait(self):
        pass

    @contextmanager
    def made_current(self, device):
        self.log.append("enter")
        self.current = True
        yield
        self.current = False
        self.log.append("leave")


class Kernel:
    """A kernel that checks what real ones do not survive, and computes in fp32."""

    def __init__(self):
        self.calls = 0

    def __call__(self, a, b, out, *operands):
        self.calls += 1
        assert 0 not in a.shape, "M = 0 kills the process in a real kernel"
        for t in (a, b, out):
            assert t.dim() == 2
            assert t.stride(1) == 1
            assert t.stride(0) >= t.shape[1]
            assert t.stride(0) % 8 == 0
            assert t.data_ptr() % 16 == 0
        value = a.float() @ b.float().T
        if operands:
            bias, residual = operands
            value = torch.relu(value + bias.float()) + residual.float()
        out.copy_(value)


def linear_of(raise_on_miss=False, devices=None):
    kernel = Kernel()
    entries = (
        Entry(4, KERNEL, TUNED, "a" * 64, RECORD),
        Entry(8, LIBRARY, TUNED, None, RECORD),
        Entry(64, KERNEL, TUNED, "a" * 64, RECORD),
    )
    functions = {"a" * 64: (kernel, 8, 16)}
    tables = {f: Dispatcher(DispatchTable(f, entries), functions) for f in (FAMILY, BIASED)}
    counters = Counters()
    return Linear(tables, counters, devices or CpuDevices(), raise_on_miss), counters, kernel


def data(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape).to(dtype)


def expected(x, w):
    return torch.nn.functional.linear(x.float(), w.float())


def counted(counters):
    return {name: n for name, n in counters.snapshot().items() if n and name != "calls"}


@pytest.mark.parametrize(
    ("m", "name"),
    [
        (3, "kernel"),
        (4, "kernel"),
        (5, "library"),
        (8, "library"),
        (50, "kernel"),
        (64, "kernel"),
        (2, "miss_below"),
        (20, "between"),
        (65, "miss_above"),
    ],
)
def test_each_m_is_served_by_its_entry_and_counted_once(m, name):
    linear, counters, kernel = linear_of()
    x, w = data(m, K), data(N, K)
    torch.testing.assert_close(linear(x, w).float(), expected(x, w), rtol=2e-2, atol=2e-2)
    assert counted(counters) == {name: 1}
    assert kernel.calls == (name == "kernel")


def test_a_family_that_the_bundle_does_not_hold_is_a_miss():
    linear, counters, _ = linear_of()
    x, w = data(4, K), data(N + 8, K)
    torch.testing.assert_close(linear(x, w).float(), expected(x, w), rtol=2e-2, atol=2e-2)
    assert counted(counters) == {"miss_family": 1}


@pytest.mark.parametrize("m", [2, 65])
def test_on_miss_raise(m):
    linear, counters, _ = linear_of(raise_on_miss=True)
    with pytest.raises(MissError, match=f"{m}x{N}x{K}"):
        linear(data(m, K), data(N, K))
    assert counters.snapshot()["calls"] == 1
    linear(data(4, K), data(N, K))
    # Between tuned points the library is the defined choice, not a miss.
    linear(data(20, K), data(N, K))


@pytest.mark.parametrize(("rows", "k"), [(0, K), (4, 0), (0, 0)])
@pytest.mark.parametrize("biased", [False, True])
def test_empty_operands_give_what_torch_gives(rows, k, biased):
    linear, counters, _ = linear_of()
    x, w, bias = data(rows, k), data(N, k), data(N) if biased else None
    torch.testing.assert_close(linear(x, w, bias), torch.nn.functional.linear(x, w, bias))
    assert counted(counters) == {"fallback_empty": 1}


def test_no_columns():
    linear, _, _ = linear_of()
    assert linear(data(4, K), data(0, K)).shape == (4, 0)


def views():
    flat = data(4 * K + 1)
    return {
        "padded": (data(4, K + 8)[:, :K], "kernel"),
        "padded_by_4": (data(4, K + 4)[:, :K], "fallback_strides"),
        "shifted": (flat[1:].view(4, K), "fallback_alignment"),
        "transposed": (data(K, 4).T, "fallback_strides"),
        "expanded": (data(1, K).expand(4, K), "fallback_strides"),
        "every_other_column": (data(4, 2 * K)[:, ::2], "fallback_strides"),
        "overlapping_rows": (flat.as_strided((4, K), (8, 1)), "fallback_strides"),
    }


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("name", sorted(views()))
def test_views_give_the_numbers_of_torch_whatever_serves_them(name, learned):
    x, path = views()[name]
    linear, counters, _ = linear_of()
    w = data(N, K)
    if learned:
        # The short way is open after the first call of its kind, and must keep the same limits.
        linear(data(4, K), w)
    torch.testing.assert_close(linear(x, w).float(), expected(x, w), rtol=2e-2, atol=2e-2)
    counts = counted(counters)
    counts["kernel"] = counts.get("kernel", 0) - learned
    assert {name: n for name, n in counts.items() if n} == {path: 1}


def test_the_short_way_is_taken_counted_and_guarded(monkeypatch):
    linear, counters, kernel = linear_of()
    x, w = data(4, K), data(N, K)
    first = linear(x, w)
    monkeypatch.setattr(linear, "_decision", lambda *a: pytest.fail("the long way was taken"))
    assert torch.equal(linear(x, w), first)
    assert torch.equal(linear(x.clone(), torch.nn.Parameter(w, requires_grad=False)), first)
    assert kernel.calls == 3
    assert counted(counters) == {"kernel": 3}


def test_entries_of_the_library_take_the_short_way_too(monkeypatch):
    linear, counters, _ = linear_of()
    x, w = data(8, K), data(N, K)
    first = linear(x, w)
    monkeypatch.setattr(linear, "_decision", lambda *a: pytest.fail("the long way was taken"))
    assert torch.equal(linear(x, w), first)
    assert counted(counters) == {"library": 2}


def test_a_call_that_torch_refuses_is_counted_once_each_time():
    mixed = replace(FAMILY, b_dtype="float32")
    counters = Counters()
    table = DispatchTable(mixed, (Entry(4, LIBRARY, TUNED, None, RECORD),))
    linear = Linear({mixed: Dispatcher(table, {})}, counters, CpuDevices(), False)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="dtype"):
            linear(data(4, K), torch.randn(N, K))
    assert counted(counters) == {"library": 3}


def test_a_kind_of_call_is_decided_once(monkeypatch):
    linear, counters, kernel = linear_of()
    x, w, bias, residual = data(2, 2, K), data(N, K), data(N), data(2, 2, N)
    out = torch.empty_like(residual)
    calls = ((x, w), (x, w, bias, "relu", residual), (x, w, bias, "relu", residual, out))
    first = [linear(*call).clone() for call in calls]
    monkeypatch.setattr(linear, "_decide", lambda *a: pytest.fail("the kind was seen before"))
    for call, result in zip(calls, first, strict=True):
        assert torch.equal(linear(*[t.clone() if isinstance(t, torch.Tensor) else t for t in call]), result)
    assert counted(counters) == {"kernel": 6}
    assert kernel.calls == 6


def test_what_is_remembered_of_calls_is_bounded(monkeypatch):
    monkeypatch.setattr(runtime_linear, "_MOST_KINDS", 5)
    linear, counters, _ = linear_of()
    decided, decide = [], linear._decide
    monkeypatch.setattr(linear, "_decide", lambda form, operands: decided.append(form.m) or decide(form, operands))
    w = data(N, K)
    for m in list(range(1, 70)) * 2:
        x = data(m, K)
        torch.testing.assert_close(linear(x, w).float(), expected(x, w), rtol=2e-2, atol=2e-2)
        linear(data(4, K), w)
        assert len(linear._decisions) <= 10
    assert counters.snapshot()["calls"] == 4 * 69
    # What is used all the time is never dropped for what is not.
    assert decided.count(4) == 1


def test_a_server_with_ragged_batches_decides_each_kind_once(monkeypatch):
    table = DispatchTable(FAMILY, tuple(Entry(m, KERNEL, TUNED, "a" * 64, RECORD) for m in range(16, 5008, 16)))
    functions = {"a" * 64: (lambda *arguments: None, 8, 16)}
    linear = Linear({FAMILY: Dispatcher(table, functions)}, Counters(), CpuDevices(), False)
    big, w = data(5000, K), data(N, K)
    for m in range(1, 5001):
        linear(big[:m], w)
    monkeypatch.setattr(linear, "_decide", lambda *a: pytest.fail("the kind was seen before"))
    for m in range(1, 5001):
        linear(big[:m], w)


def test_pointers_are_looked_at_in_every_call():
    """Where tensors lie is no part of their kind."""
    linear, counters, _ = linear_of()
    x, w, bias, residual = data(4, K), data(N, K), data(N + 1), data(4 * N + 1)
    flat = data(4 * K + 1)
    aligned = (x, w, bias[:N], "relu", residual[: 4 * N].view(4, N))
    linear(*aligned)
    assert counted(counters) == {"kernel": 1}
    shifted = ((flat[1:].view(4, K), *aligned[1:]), (x, w, bias[1:], *aligned[3:]))
    for x_, w_, bias_, activation, residual_ in (*shifted, (*aligned[:4], residual[1:].view(4, N))):
        want = torch.relu(expected(x_, w_) + bias_.float()) + residual_.float()
        torch.testing.assert_close(linear(x_, w_, bias_, activation, residual_).float(), want, rtol=2e-2, atol=5e-2)
    assert counted(counters) == {"kernel": 1, "fallback_alignment": 3}


def test_what_closes_the_short_way():
    linear, counters, _ = linear_of()
    x, w = data(4, K), data(N, K)
    linear(x, w)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        linear(x, w)
    linear(x.clone().requires_grad_(), w)
    linear(x, w.T.contiguous().T)
    linear(x.as_subclass(Marked), w)
    linear(data(20, K), w)
    assert counted(counters) == {
        "kernel": 1,
        "fallback_autocast": 1,
        "fallback_autograd": 1,
        "fallback_strides": 1,
        "fallback_subclass": 1,
        "between": 1,
    }
    linear.forked = True
    with pytest.raises(DeviceError):
        linear(x, w)


class Marked(torch.Tensor):
    """A tensor subclass that changes nothing."""


def test_under_vmap_the_library_serves():
    linear, counters, _ = linear_of()
    x, w = data(3, 4, K), data(N, K)
    linear(x[0], w)
    out = torch.func.vmap(lambda row: linear(row, w))(x)
    torch.testing.assert_close(out.float(), expected(x, w), rtol=2e-2, atol=2e-2)
    assert counted(counters)["fallback_subclass"] == 1


def test_dtypes_that_problems_do_not_have_go_to_the_library():
    linear, counters, _ = linear_of()
    x, w = torch.randn(4, K, dtype=torch.float64), torch.randn(N, K, dtype=torch.float64)
    assert torch.equal(linear(x, w), torch.nn.functional.linear(x, w))
    assert counted(counters) == {"miss_family": 1}


def test_an_epilogue_operand_of_another_dtype_goes_to_the_library():
    linear, counters, kernel = linear_of()
    x, w = data(4, K), data(N, K)
    linear(x, w, data(N), "relu", torch.randn(4, N))
    assert kernel.calls == 0
    assert counted(counters) == {"fallback_dtype": 1}


def test_an_out_that_is_an_operand_goes_to_the_library():
    square = ProblemFamily.of(K, K)
    kernel = Kernel()
    table = DispatchTable(square, (Entry(K, KERNEL, TUNED, "a" * 64, RECORD),))
    counters = Counters()
    linear = Linear({square: Dispatcher(table, {"a" * 64: (kernel, 8, 16)})}, counters, CpuDevices(), False)
    buffer = data(2 * K, K)
    for x, w, out in ((buffer[:K], data(K, K), buffer[:K]), (data(K, K), buffer[:K], buffer[8 : K + 8])):
        want = expected(x, w)
        torch.testing.assert_close(linear(x, w, out=out).float(), want, rtol=2e-2, atol=1e-1)
    assert kernel.calls == 0
    assert counted(counters) == {"fallback_out": 2}
    linear(buffer[:K], data(K, K), out=buffer[K:])
    assert kernel.calls == 1


def test_warm_up_launches_each_kernel_once_with_all_its_operands():
    linear, _, kernel = linear_of()
    assert linear.warm_up(torch.device("cpu")) == 1
    assert kernel.calls == 1


def test_a_weight_view_is_guarded_too():
    linear, counters, _ = linear_of()
    x, w = data(4, K), data(K, N).T
    torch.testing.assert_close(linear(x, w).float(), expected(x, w), rtol=2e-2, atol=2e-2)
    assert counted(counters) == {"fallback_strides": 1}


@pytest.mark.parametrize("shape", [(K,), (1, K), (2, 2, K), (2, 1, 2, K)])
def test_any_number_of_leading_dimensions(shape):
    linear, counters, _ = linear_of()
    x, w = data(*shape), data(N, K)
    out = linear(x, w)
    assert out.shape == (*shape[:-1], N)
    torch.testing.assert_close(out.float(), expected(x, w), rtol=2e-2, atol=2e-2)
    assert counters.snapshot()["calls"] == 1


def test_epilogue_operands_reach_the_kernel_in_order():
    linear, counters, kernel = linear_of()
    x, w, bias, residual = data(2, 2, K), data(N, K), data(N), data(2, 2, N)
    out = linear(x, w, bias, "relu", residual)
    want = torch.relu(expected(x, w) + bias.float()) + residual.float()
    torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=4e-2)
    assert kernel.calls == 1
    assert counted(counters) == {"kernel": 1}


def test_out_is_written_and_returned_by_every_path():
    for m in (4, 8, 20):
        linear, _, _ = linear_of()
        x, w, out = data(m, K), data(N, K), torch.full((m, N), float("nan"), dtype=torch.bfloat16)
        assert linear(x, w, out=out) is out
        torch.testing.assert_close(out.float(), expected(x, w), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["padded", "transposed", "strided_3d"])
def test_out_views_are_written_in_place(kind):
    linear, _, _ = linear_of()
    w = data(N, K)
    if kind == "padded":
        x, out = data(4, K), torch.zeros(4, N + 8, dtype=torch.bfloat16)[:, :N]
    elif kind == "transposed":
        x, out = data(4, K), torch.zeros(N, 4, dtype=torch.bfloat16).T
    else:
        x, out = data(2, 2, K), torch.zeros(2, 3, N, dtype=torch.bfloat16)[:, :2]
    assert linear(x, w, out=out) is out
    torch.testing.assert_close(out.float(), expected(x, w), rtol=2e-2, atol=2e-2)


def test_an_out_that_overlaps_itself_goes_to_torch_which_refuses_it():
    linear, counters, _ = linear_of()
    out = torch.zeros(1, N, dtype=torch.bfloat16).expand(4, N)
    with pytest.raises(RuntimeError):
        linear(data(4, K), data(N, K), out=out)
    assert counted(counters) == {"fallback_out": 1}


def test_gradients_go_through_the_library():
    linear, counters, _ = linear_of()
    x, w = data(4, K).requires_grad_(), data(N, K)
    linear(x, w).sum().backward()
    assert x.grad is not None
    assert counted(counters) == {"fallback_autograd": 1}
    with torch.no_grad():
        linear(x, w)
    assert counted(counters) == {"fallback_autograd": 1, "kernel": 1}


def test_autocast_goes_through_the_library_and_changes_the_dtype_as_torch_does():
    linear, counters, _ = linear_of()
    x, w = data(4, K), data(N, K)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, w).dtype == torch.bfloat16
    assert counted(counters) == {"fallback_autocast": 1}


def test_another_current_device_is_left_as_it_was():
    devices = CpuDevices(current=False)
    linear, _, kernel = linear_of(devices=devices)
    linear(data(4, K), data(N, K))
    assert kernel.calls == 1
    assert devices.log == ["enter", "leave"]
    assert devices.current is False


def test_a_device_that_the_bundle_does_not_serve_goes_to_the_library():
    devices = CpuDevices()
    devices.serves = lambda device: False
    linear, counters, _ = linear_of(devices=devices)
    linear(data(4, K), data(N, K))
    assert counted(counters) == {"fallback_device": 1}


def test_after_a_fork_kernels_are_a_clear_error_and_the_library_still_serves():
    linear, _, _ = linear_of()
    linear.forked = True
    with pytest.raises(DeviceError, match="fork"):
        linear(data(4, K), data(N, K))
    assert linear(data(8, K), data(N, K)).shape == (8, N)


@pytest.mark.parametrize(
    "arguments",
    [
        {"w": data(N, K + 1)},
        {"w": data(N)},
        {"w": data(2, N, K)},
        {"bias": data(N + 1)},
        {"bias": data(1, N)},
        {"residual": data(4, N + 1)},
        {"out": data(5, N)},
        {"out": data(4, N).float(), "out_dtype": torch.bfloat16},
        {"activation": "swish"},
        {"activation": ["relu"]},
        {"activation": "relu", "gate": "swiglu"},
        {"gate": "glu"},
        {"gate": "swiglu", "residual": data(4, N)},
        {"gate": "swiglu", "out": data(4, N)},
        {"gate": "swiglu", "w": data(N + 1, K)},
        {"out_dtype": "bfloat16"},
        {"bias": [0.0] * N},
        {"x": [[0.0] * K]},
        {"x": data(2, 4, K), "w": data(3, N, K)},
        {"x": data(2, 2, 4, K), "w": data(2, N, K)},
        {"x": data(4, K), "w": data(4, N, K)},
        {"x": torch.tensor(1.0)},
    ],
)
def test_what_does_not_fit_is_a_usage_error(arguments):
    linear, counters, _ = linear_of()
    with pytest.raises(UsageError):
        linear(**{"x": data(4, K), "w": data(N, K), **arguments})
    assert counters.snapshot()["calls"] == 0


def test_counters_lose_nothing_under_threads():
    linear, counters, _ = linear_of()
    x, w = data(4, K), data(N, K)

    def work():
        for _ in range(200):
            linear(x, w)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.snapshot() == counters.snapshot()
    assert counted(counters) == {"kernel": 1600}


def test_every_rank_makes_the_same_choice():
    first, second = linear_of()[0], linear_of()[0]
    for m in range(1, 100):
        one, other = (linear._families[FAMILY].choose(m) for linear in (first, second))
        assert (one.entry, one.where) == (other.entry, other.where)
