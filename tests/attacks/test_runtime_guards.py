"""The limits in front of a kernel: shapes and strides that no test could allocate, memory that is not the value."""

from __future__ import annotations

import ctypes

import pytest

from gemmcache.bundle.interface import KERNEL, TUNED, DispatchTable, Entry
from gemmcache.problem import ProblemFamily
from gemmcache.runtime.counters import Counters
from gemmcache.runtime.dispatch import Dispatcher
from gemmcache.runtime.guards import matrix_flaw, overlap, transposed, vector_flaw

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from gemmcache.errors import UsageError  # noqa: E402
from gemmcache.runtime.linear import Linear  # noqa: E402
from tests.unit.test_runtime_linear import CpuDevices, counted, data  # noqa: E402

N, K = 32, 64
plain = torch.nn.functional.linear


def meta(rows: int, columns: int, row_stride: int, column_stride: int = 1):
    """A tensor without memory; as_strided checks nothing on this device."""
    base = torch.empty((rows - 1) * abs(row_stride) + columns * column_stride + 1, device="meta", dtype=torch.bfloat16)
    return base.as_strided((rows, columns), (row_stride, column_stride))


@pytest.mark.parametrize(
    ("rows", "columns", "row_stride"),
    [
        (1 << 16, 1 << 15, 1 << 15),
        ((1 << 31) // 28672 + 1, 28672, 28672),
        (1 << 20, 64, 1 << 11),
        (1 << 31, 8, 8),
        (2, 64, (1 << 31) - 8),
        (3, 64, 1 << 40),
    ],
)
def test_what_spans_two_to_the_31_elements_goes_to_the_library(rows, columns, row_stride):
    assert matrix_flaw(meta(rows, columns, row_stride), 8) == "size"


def test_what_stays_just_below_is_taken():
    assert matrix_flaw(meta((1 << 31) // 28672, 28672, 28672), 8) is None
    assert matrix_flaw(meta(2, 64, (1 << 30) - 8), 8) is None


@pytest.mark.parametrize(
    ("shape", "flaw"),
    [
        ((4, 64, 64), None),
        ((4, 64, 72), None),
        ((4, 64, 68), "strides"),
        ((4, 64, 63), "strides"),
        ((4, 64, 32), "strides"),
        ((4, 64, 0), "strides"),
        ((4, 64, 128, 2), "strides"),
        ((4, 64, 1, 4), "strides"),
    ],
)
def test_rows_that_a_kernel_does_not_take_are_told_by_what_is_wrong(shape, flaw):
    assert matrix_flaw(meta(*shape), 8) == flaw


@pytest.mark.parametrize(
    ("shape", "strides", "flaw"),
    [
        ((), (), None),
        ((8,), (1,), None),
        ((8, 1), (1, 1), None),
        ((1, 8), (99, 1), None),
        ((2, 4, 1), (4, 1, 1), None),
        ((8,), (2,), "alignment"),
        ((8,), (0,), "alignment"),
        ((8, 1), (5, 1), "alignment"),
        ((2, 4, 1), (8, 1, 1), "alignment"),
        ((1,), (2,), "alignment"),
    ],
)
def test_vectors_with_gaps_are_told(shape, strides, flaw):
    assert vector_flaw(torch.zeros(64).as_strided(shape, strides)) == flaw


@pytest.mark.parametrize(
    ("shape", "turned"),
    [
        ((4, 64, 64), False),
        ((4, 64, 1, 4), True),
        ((4, 64, 1, 8), True),
        ((4, 64, 1, 3), False),
        ((1, 64, 64), False),
        ((64, 1, 1), False),
        ((4, 64, 0), False),
        ((4, 64, 2, 8), False),
    ],
)
def test_columns_that_are_contiguous_make_a_matrix_transposed(shape, turned):
    assert transposed(meta(*shape)) is turned


def memory_of(t):
    """A tensor over the memory that a compiled kernel would read, whatever torch says of `t`."""
    kind = ctypes.c_char * (t.numel() * t.element_size())
    return torch.frombuffer(kind.from_address(t.data_ptr()), dtype=t.dtype).view(t.shape)


def compiled(a, b, out, *operands):
    value = plain(memory_of(a), memory_of(b))
    for operand in operands:
        value = value + memory_of(operand)
    memory_of(out).copy_(value)


def served():
    """A call with kernels that go by addresses, as compiled ones do, and has seen its plain kind; and its counters."""
    tables = {
        family: Dispatcher(
            DispatchTable(family, (Entry(4, KERNEL, TUNED, "a" * 64, "9" * 64),)), {"a" * 64: (compiled, 8, 16)}
        )
        for family in (ProblemFamily.of(N, K), ProblemFamily.of(N, K, epilogue="bias"))
    }
    counters = Counters()
    linear = Linear(tables, counters, CpuDevices(), False)
    linear(data(4, K), data(N, K))
    assert counted(counters) == {"kernel": 1}
    return linear, counters


#: torch says it of its own use too: forward-mode differentiation compiles formulas so.
jit_is_deprecated = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
FELL_BACK = {"kernel": 1, "fallback_subclass": 1}


@pytest.fixture(params=["short", "long"])
def call(request):
    """A call on the short way, and the same one on the long way."""
    linear, counters = served()
    options = {} if request.param == "short" else {"out_dtype": torch.bfloat16}
    return lambda x, w: linear(x, w, **options), counters


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("make", [torch._neg_view, lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype)])
def test_memory_that_is_not_the_value_is_not_read(call, make, place):
    linear, counters = call
    tensors = [data(4, K), data(N, K)]
    tensors[place] = make(tensors[place])
    torch.testing.assert_close(linear(*tensors), plain(*tensors))
    assert counted(counters) == FELL_BACK


def test_memory_that_is_not_the_value_is_not_read_as_a_bias_nor_written():
    linear, counters = served()
    x, w, bias = data(4, K), data(N, K), torch._neg_view(data(N))
    torch.testing.assert_close(linear(x, w, bias), plain(x, w, bias), rtol=2e-2, atol=1e-1)
    out = torch._neg_view(torch.empty(4, N, dtype=torch.bfloat16))
    assert linear(x, w, out=out) is out
    torch.testing.assert_close(out.resolve_neg(), plain(x, w), rtol=2e-2, atol=1e-1)
    assert counted(counters) == {"kernel": 1, "fallback_subclass": 2}


@jit_is_deprecated
@pytest.mark.parametrize("place", [0, 1])
def test_tangents_of_forward_mode_are_torchs(call, place):
    linear, counters = call
    tensors = [data(4, K), data(N, K)]
    with forward_ad.dual_level(), torch.no_grad():
        linear(*tensors)
        tensors[place] = forward_ad.make_dual(tensors[place], torch.ones_like(tensors[place]))
        found, want = (forward_ad.unpack_dual(f(*tensors)) for f in (linear, plain))
    assert torch.equal(found.tangent, want.tangent)
    # Without a tangent the kernel may serve.
    assert counted(counters) == {"kernel": 2, "fallback_subclass": 1}


@jit_is_deprecated
def test_a_tangent_of_a_bias_is_torchs():
    linear, counters = served()
    x, w, bias = data(4, K), data(N, K), data(N)
    with forward_ad.dual_level(), torch.no_grad():
        dual = forward_ad.make_dual(bias, torch.ones_like(bias))
        assert torch.equal(forward_ad.unpack_dual(linear(x, w, dual)).tangent, torch.ones_like(x @ w.T))
    assert counted(counters) == FELL_BACK


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_graph_holds_torchs_operators_whatever_mode_traces_it(call, mode):
    linear, counters = call
    x, w = data(4, K), data(N, K)
    graph = make_fx(lambda x, w: linear(x, w) * 1, tracing_mode=mode)(x, w)
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert any(name.startswith("aten.mm") for name in names)
    assert not any("new_empty" in name for name in names)
    x, w = data(4, K), data(N, K)
    torch.testing.assert_close(graph(x, w), plain(x, w))
    assert counted(counters) == FELL_BACK


def test_a_call_that_torch_refuses_under_a_mode_is_counted_and_one_that_does_not_fit_is_not():
    linear, counters = served()
    with FlopCounterMode(display=False):
        with pytest.raises(RuntimeError, match="dtype"):
            linear(data(4, K), torch.randn(N, K))
        for x in (data(4, K + 1), [[0.0] * K]):
            with pytest.raises(UsageError):
                linear(x, data(N, K))
    assert counted(counters) == FELL_BACK


def test_modes_see_the_operators(call):
    linear, counters = call
    x, w = data(4, K), data(N, K)
    with FlopCounterMode(display=False) as flops:
        linear(x, w)
    assert flops.get_total_flops() == 2 * 4 * N * K
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(linear(x, w), torch._subclasses.FakeTensor)
    assert counted(counters) == {"kernel": 1, "fallback_subclass": 2}


def test_an_out_under_a_mode_is_written_by_torch():
    linear, counters = served()
    with FakeTensorMode():
        x, w, out = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((4, K), (N, K), (4, N)))
        assert linear(x, w, out=out) is out
    # The mode is over, its tensors are not.
    assert linear(x, w, out=out) is out
    assert counted(counters) == {"kernel": 1, "fallback_subclass": 2}


@jit_is_deprecated
@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x, w: torch.func.functionalize(f)(x, w),
        lambda f, x, w: torch.func.jvp(f, (x, w), (x, w))[1],
        lambda f, x, w: torch.func.vmap(f, in_dims=(0, None))(x.view(1, 4, K), w),
        lambda f, x, w: torch.func.grad(lambda x: f(x, w).float().sum())(x),
    ],
)
def test_transforms_of_functions_are_torchs(call, transform):
    linear, counters = call
    x, w = data(4, K), data(N, K)
    torch.testing.assert_close(transform(linear, x, w), transform(plain, x, w))
    assert counted(counters) == FELL_BACK


@jit_is_deprecated
def test_a_traced_function_holds_torchs_operators(call):
    linear, counters = call
    traced = torch.jit.trace(lambda x, w: linear(x, w) * 1, (data(4, K), data(N, K)), check_trace=False)
    x, w = data(7, K), data(N, K)
    torch.testing.assert_close(traced(x, w), plain(x, w))
    assert counted(counters) == FELL_BACK


@jit_is_deprecated
def test_a_traced_epilogue_holds_torchs_operators():
    linear, counters = served()
    residual = data(4, N)
    traced = torch.jit.trace(
        lambda x, w, r: linear(x, w, activation="relu", residual=r),
        (data(4, K), data(N, K), residual),
        check_trace=False,
    )
    x, w, residual = data(7, K), data(N, K), data(7, N)
    torch.testing.assert_close(traced(x, w, residual), torch.relu(plain(x, w)) + residual)
    assert counted(counters) == FELL_BACK


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("biased", [False, True])
def test_nested_operands_are_torchs(layout, biased):
    linear, counters = served()
    rows, w, bias = [data(2, K), data(3, K)], data(N, K), data(N) if biased else None
    x = torch.nested.nested_tensor(rows, dtype=torch.bfloat16, layout=layout)
    for found, want in zip(linear(x, w, bias).unbind(), plain(x, w, bias).unbind(), strict=True):
        assert torch.equal(found, want)
    assert counted(counters) == FELL_BACK
    with pytest.raises(UsageError, match="nested"):
        linear(x, w, activation="relu")
    assert counted(counters) == FELL_BACK


def test_out_over_an_operand_is_seen_through_other_storages():
    linear, counters = served()
    x, w = data(4, K), data(N, K)
    want = plain(x, w)
    out = torch.from_dlpack(w.view(-1)[128 : 128 + 4 * N]).view(4, N)
    assert out.untyped_storage().data_ptr() != w.untyped_storage().data_ptr()
    assert linear(x, w, out=out) is out
    assert torch.equal(out, want)
    assert counted(counters) == {"kernel": 1, "fallback_out": 1}


def test_spans_of_addresses_overlap_and_touching_or_empty_ones_do_not():
    t = torch.arange(64.0)
    wide = t.view(8, 8)[:, 2:4]
    assert overlap(t[:33], [None, t[60:], t[32:40]])
    assert overlap(wide, [t[57:59]])
    assert not overlap(wide, [t[:2], t[60:], None])
    assert not overlap(t[:32], [t[32:], t[16:16], t.view(8, 8)[4:, 1:3]])


@pytest.mark.parametrize("options", [{}, {"activation": "relu"}, {"bias": data(N)}])
def test_a_compiled_call_with_out_is_one_graph(options):
    linear, counters = served()
    serve, x, w, out = linear.__call__, data(4, K), data(N, K), torch.empty(4, N, dtype=torch.bfloat16)
    traced = torch.compile(lambda x, w, out: serve(x, w, out=out, **options), backend="eager", fullgraph=True)
    with torch.inference_mode():
        traced(x, w, out)
    want = plain(x, w, options.get("bias"))
    torch.testing.assert_close(out, torch.relu(want) if "activation" in options else want, rtol=2e-2, atol=1e-1)
    assert counted(counters) == {"kernel": 1}
