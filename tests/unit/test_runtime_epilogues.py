"""`bundle.linear` with every epilogue, dtype and layout: the ABI that kernels see, and the same numbers from all."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemmcache.bundle.interface import KERNEL, LIBRARY, TUNED, DispatchTable, Entry
from gemmcache.dtypes import accumulator_for
from gemmcache.epilogue import Epilogue
from gemmcache.errors import MissError, UsageError
from gemmcache.problem import ProblemFamily
from gemmcache.reference import reference, relative_error
from gemmcache.runtime import fallback
from gemmcache.runtime.counters import Counters
from gemmcache.runtime.dispatch import Dispatcher
from gemmcache.runtime.linear import Linear
from tests.calls import call_of, can_be_called, expected, limit_of, matrix
from tests.strategies import epilogues
from tests.unit.test_runtime_linear import CpuDevices, counted, data

N, K = 32, 64
PLAIN = ProblemFamily.of(N, K)
RECORD = "9" * 64
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


class AbiKernel:
    """A kernel for one family that refuses what the compiled entry would not survive, and computes its reference."""

    def __init__(self, family: ProblemFamily, divisibility: int, align: int) -> None:
        self.family, self.divisibility, self.align = family, divisibility, align
        self.calls = 0

    def check(self, t, shape, dtype, align, strides=None):
        assert tuple(t.shape) == shape
        assert t.dtype == getattr(torch, dtype)
        assert t.data_ptr() % align == 0
        if strides is None:
            assert t.stride() == (1,)
            return
        by_columns, divisor = strides
        contiguous, apart = t.stride() if by_columns else t.stride()[::-1]
        assert contiguous == 1
        assert apart % divisor == 0
        assert apart >= shape[0 if by_columns else 1]

    def __call__(self, a, b, out, *operands):
        family, align = self.family, self.align
        m, k = a.shape
        n, columns = b.shape[0], family.epilogue.out_columns(b.shape[0])
        assert m
        assert k % self.divisibility == n % self.divisibility == 0
        out_divisor = align // getattr(torch, family.out_dtype).itemsize
        self.check(a, (m, k), family.a_dtype, align, (family.a_layout == "km", self.divisibility))
        self.check(b, (n, k), family.b_dtype, align, (family.b_layout == "kn", self.divisibility))
        self.check(out, (m, columns), family.out_dtype, align, (False, out_divisor))
        single = family.epilogue.scale == "tensor"
        named = dict(zip(family.epilogue.operands(), operands, strict=True))
        for name, t in named.items():
            if name == "residual":
                self.check(t, (m, columns), family.out_dtype, align, (False, out_divisor))
            elif name == "bias":
                self.check(t, (n,), family.out_dtype, align)
            elif single:
                self.check(t, (1,), "float32", 4)
            else:
                self.check(t, (m,) if name == "scale_a" else (n,), "float32", 4 if name == "scale_a" else align)
        self.calls += 1
        out.copy_(reference(family, a, b, named))


def served(*families, divisibility=8, choice=KERNEL, raise_on_miss=False):
    """A call with one entry for each m up to 16 and each family, its counters, and the kernels by family."""
    torch.manual_seed(7)
    kernels = {f: AbiKernel(f, divisibility, 16) for f in families}
    tables = {}
    for i, (family, kernel) in enumerate(kernels.items()):
        digest = f"{i:064x}" if choice == KERNEL else None
        entries = tuple(Entry(m, choice, TUNED, digest, RECORD) for m in (1, 2, 4, 8, 16))
        tables[family] = Dispatcher(DispatchTable(family, entries), {digest: (kernel, divisibility, 16)})
    counters = Counters()
    return Linear(tables, counters, CpuDevices(), raise_on_miss), counters, kernels


def close(out, want, dtype="bfloat16"):
    assert out.shape == want.shape
    assert out.dtype == getattr(torch, dtype)
    assert relative_error(out.detach().float(), want.detach()) <= 1e-2


@st.composite
def callable_families(draw: st.DrawFn) -> ProblemFamily:
    a, b = draw(
        st.sampled_from([*[(d, d) for d in ("bfloat16", "float16", "float32", "int8")], (E4M3, E4M3), (E4M3, E5M2)])
    )
    epilogue = draw(epilogues())
    return ProblemFamily(
        n=draw(st.sampled_from([32, 64, 96])),
        k=draw(st.sampled_from([32, 64])),
        a_dtype=a,
        b_dtype=b,
        out_dtype=draw(st.sampled_from(["bfloat16", "float32"] if a == "int8" else ["bfloat16", "float16", "float32"])),
        acc_dtype=accumulator_for(a),
        a_layout=draw(st.sampled_from(["mk", "km"])),
        b_layout=draw(st.sampled_from(["nk", "kn"])),
        epilogue=replace(epilogue, beta="1"),
    )


@given(callable_families(), st.sampled_from([1, 2, 15, 16]), st.sampled_from([KERNEL, LIBRARY]))
def test_every_family_that_can_be_called_is_served_by_its_entry_with_the_right_numbers(family, m, choice):
    """An m is never taken for another family: each call has one entry, and on_miss='raise' is on."""
    assert can_be_called(family)
    linear, counters, kernels = served(family, divisibility=16, choice=choice, raise_on_miss=True)
    call = call_of(family, m)
    first = linear(**call)
    assert first.dtype == getattr(torch, family.out_dtype)
    assert relative_error(first.float(), expected(family, call)) <= limit_of(family)
    # Remembered, and into an out that is given: the same.
    assert torch.equal(linear(**call), first)
    out = torch.full_like(first, 9)
    assert linear(**call, out=out) is out
    assert torch.equal(out, first)
    assert counted(counters) == {choice: 3}
    assert kernels[family].calls == (3 if choice == KERNEL else 0)


@given(callable_families(), st.sampled_from([1, 3, 16]))
def test_a_warmed_kernel_saw_operands_that_it_takes(family, m):
    linear, counters, kernels = served(family, divisibility=16)
    assert linear.warm_up(torch.device("cpu")) == 1
    assert kernels[family].calls == 1
    assert counted(counters) == {}


@pytest.mark.parametrize("divisibility", [1, 8, 16, 24])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", E4M3])
def test_warm_up_keeps_every_divisibility(dtype, divisibility):
    family = ProblemFamily.of(48, 48, dtype, "scale_row_column+bias+swiglu+residual")
    linear, _, kernels = served(family, divisibility=divisibility)
    linear.warm_up(torch.device("cpu"))
    assert kernels[family].calls == 1


FP8 = ProblemFamily.of(N, K, "fp8", "scale_tensor", out="bf16")


def scaled(scale):
    return replace(FP8, epilogue=Epilogue(scale=scale))


@pytest.mark.parametrize(
    ("scale", "a", "b"),
    [
        ("tensor", (), ()),
        ("tensor", (1,), (1, 1)),
        ("tensor", (1, 1), (1,)),
        ("row", (6,), None),
        ("row", (6, 1), None),
        ("row", (2, 3), None),
        ("row", (2, 3, 1), None),
        ("column", None, (N,)),
        ("column", None, (1, N)),
        ("row_column", (6, 1), (1, N)),
        ("row_column", (2, 3, 1), (N,)),
    ],
)
@pytest.mark.parametrize("choice", [KERNEL, LIBRARY])
def test_the_shapes_of_scales_tell_their_kind(scale, a, b, choice):
    families = [scaled(s) for s in ("tensor", "row", "column", "row_column")]
    linear, counters, kernels = served(*families, choice=choice, raise_on_miss=True)
    x, w = matrix(6, K, E4M3, False), matrix(N, K, E4M3, False)
    scales = {f"scale_{s}": torch.rand(shape) + 0.5 for s, shape in (("a", a), ("b", b)) if shape is not None}
    out = linear(x.view(2, 3, K), w, **scales)
    assert Counter({f.epilogue.scale: k.calls for f, k in kernels.items()}) == Counter({scale: int(choice == KERNEL)})
    assert counted(counters) == {choice: 1}
    want = expected(scaled(scale), {"x": x, "w": w, **{n: s.reshape(-1) for n, s in scales.items()}})
    close(out.view(6, N), want)


def test_one_row_has_row_scales_beside_column_scales_and_a_tensors_beside_one():
    families = [scaled(s) for s in ("tensor", "row", "row_column")]
    linear, _, kernels = served(*families)
    x, w, one = matrix(1, K, E4M3, False), matrix(N, K, E4M3, False), torch.tensor([2.0])
    linear(x, w, scale_a=one, scale_b=one)
    linear(x, w, scale_a=one)
    linear(x, w, scale_a=one, scale_b=torch.ones(N))
    assert [kernels[f].calls for f in families] == [1, 1, 1]


@pytest.mark.parametrize(
    ("rows", "scale"), [((1,), "row_column"), ((5,), "row_column"), ((1, 1), "row_column"), ((), "tensor")]
)
def test_one_column(rows, scale):
    m = math.prod(rows)
    family = ProblemFamily.of(1, K, "fp8", f"scale_{scale}", out="bf16")
    linear, counters, _ = served(family, choice=LIBRARY, raise_on_miss=True)
    x, w = matrix(max(m, 3) if rows == () else m, K, E4M3, False), matrix(1, K, E4M3, False)
    linear(x, w, scale_a=torch.rand(rows), scale_b=torch.rand(1))
    assert counted(counters) == {"library": 1}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((1,), None),
        (None, (1,)),
        ((5,), None),
        (None, (N + 1,)),
        (None, (N, 1)),
        ((6,), (1,)),
        ((1,), (N,)),
        ((6, N), None),
        ((1, 6), None),
        ((3, 2), None),
        ((6,), (5,)),
    ],
)
def test_scales_of_no_kind_are_a_usage_error_with_a_remedy(a, b):
    linear, counters, _ = served(FP8)
    scales = {f"scale_{s}": torch.ones(shape) for s, shape in (("a", a), ("b", b)) if shape is not None}
    with pytest.raises(UsageError, match="one element each"):
        linear(matrix(6, K, E4M3, False).view(2, 3, K), matrix(N, K, E4M3, False), **scales)
    with pytest.raises(UsageError, match="not a tensor"):
        linear(matrix(6, K, E4M3, False), matrix(N, K, E4M3, False), scale_a=2.0)
    assert counters.snapshot()["calls"] == 0


FULL = ProblemFamily.of(N, K, epilogue="scale_row_column+bias+swiglu+residual")


def full(m=4):
    call = call_of(FULL, m)
    del call["out_dtype"]
    return call


FLAWS = {
    "bias_dtype": ("dtype", {"bias": data(N).float()}),
    "residual_dtype": ("dtype", {"residual": data(4, N // 2).half()}),
    "scale_dtype": ("dtype", {"scale_a": torch.ones(4, dtype=torch.float64)}),
    "column_scale_dtype": ("dtype", {"scale_b": torch.ones(N).bfloat16()}),
    "bias_gaps": ("alignment", {"bias": data(2 * N)[::2]}),
    "bias_pointer": ("alignment", {"bias": data(N + 1)[1:]}),
    "row_scale_gaps": ("alignment", {"scale_a": torch.ones(4, 3)[:, :1]}),
    "row_scale_expanded": ("alignment", {"scale_a": torch.ones(1).expand(4)}),
    "column_scale_gaps": ("alignment", {"scale_b": torch.ones(2 * N)[::2]}),
    "column_scale_pointer": ("alignment", {"scale_b": torch.ones(N + 1)[1:]}),
    "residual_pointer": ("alignment", {"residual": data(4 * 16 + 1)[1:].view(4, 16)}),
    "residual_strides": ("strides", {"residual": data(4, 20)[:, :16]}),
    "residual_transposed": ("strides", {"residual": data(16, 4).T}),
    "bias_grad": ("autograd", {"bias": data(N).requires_grad_()}),
    "scale_grad": ("autograd", {"scale_b": torch.rand(N, requires_grad=True)}),
    "out_strides": ("strides", {"out": data(4, 20)[:, :16]}),
}


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("name", sorted(FLAWS))
def test_operands_outside_the_limits_go_to_the_library_counted(name, seen):
    reason, changes = FLAWS[name]
    linear, counters, kernels = served(FULL)
    call = full()
    if seen:
        linear(**call)
    call |= changes
    out = linear(**call)
    close(out, expected(FULL, call))
    assert counted(counters) == {f"fallback_{reason}": 1, **({"kernel": 1} if seen else {})}
    assert kernels[FULL].calls == seen


def test_words_of_a_call_are_part_of_its_kind():
    """The same tensors with other words are other problems, however often each was seen."""
    texts = ["none", "relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu"]
    families = [ProblemFamily.of(N, K, epilogue=text, out=out) for text in texts for out in ("bf16", "fp32")]
    linear, counters, _ = served(*families)
    same = call_of(PLAIN, 4)
    for family in families * 2:
        call = call_of(family, 4) | {"x": same["x"], "w": same["w"]}
        close(linear(**call), expected(family, call), family.out_dtype)
    assert counted(counters) == {"kernel": 2 * len(families)}


@pytest.mark.parametrize("name", ["x", "w", "bias", "residual", "scale_a", "scale_b"])
def test_the_library_does_not_write_to_what_it_still_reads(name, monkeypatch):
    family = ProblemFamily.of(K, K, "fp32", "scale_row_column+bias+residual")
    linear, counters, _ = served(family, choice=LIBRARY)
    seen, computed = [], fallback.library.library_op

    def library_op(*arguments):
        seen.append(arguments[-1])
        return computed(*arguments)

    monkeypatch.setattr(fallback.library, "library_op", library_op)
    call = call_of(family, 16)
    del call["out_dtype"]
    want = expected(family, call)
    apart = torch.empty(16, K)
    close(linear(**call, out=apart), want, "float32")
    buffer = torch.zeros(2 * K, K)
    t = call[name]
    call[name] = buffer.view(-1)[8 : t.numel() + 8].view(t.shape).copy_(t)
    out = buffer[:16]
    assert linear(**call, out=out) is out
    close(out, want, "float32")
    assert [s is None for s in seen] == [False, True]
    assert counted(counters) == {"library": 2}


def test_row_scales_may_start_at_any_element():
    linear, counters, _ = served(FULL)
    call = full()
    call["scale_a"] = torch.rand(5)[1:]
    close(linear(**call), expected(FULL, call))
    assert counted(counters) == {"kernel": 1}


def test_operands_of_several_dimensions_reach_the_kernel_flattened():
    linear, counters, _ = served(FULL)
    call = full(6)
    want = expected(FULL, call)
    wide = {"x": (2, 3, K), "residual": (2, 3, N // 2), "scale_a": (2, 3, 1), "scale_b": (1, N)}
    out = linear(**(call | {name: call[name].view(shape) for name, shape in wide.items()}))
    assert out.shape == (2, 3, N // 2)
    close(out.view(6, -1), want)
    assert counted(counters) == {"kernel": 1}


def test_a_residual_may_be_out_itself_and_a_view_of_it_may_not():
    linear, counters, _ = served(FULL)
    for view, name in ((False, "kernel"), (True, "fallback_out")):
        call = full()
        want, out = expected(FULL, call), call["residual"]
        call |= {"out": out, "residual": out.view(4, N // 2) if view else out}
        assert linear(**call) is out
        close(out, want)
        assert counted(counters).pop(name) == 1


def test_an_out_over_scales_or_bias_goes_to_the_library():
    family = ProblemFamily.of(N, K, "fp32", "bias")
    linear, counters, _ = served(family)
    buffer = torch.randn(4 * N)
    call = {"x": torch.randn(4, K), "w": torch.randn(N, K), "bias": buffer[N : 2 * N]}
    want = expected(family, call | {"bias": call["bias"].clone()})
    close(linear(**call, out=buffer.view(4, N)), want, "float32")
    assert counted(counters) == {"fallback_out": 1}


@pytest.mark.parametrize(
    ("x", "w", "options", "out"),
    [
        (torch.bfloat16, torch.bfloat16, {}, torch.bfloat16),
        (torch.float16, torch.float16, {}, torch.float16),
        (torch.float32, torch.float32, {}, torch.float32),
        (torch.float64, torch.float64, {}, torch.float64),
        (torch.float8_e4m3fn, torch.float8_e4m3fn, {}, torch.bfloat16),
        (torch.float8_e5m2, torch.float8_e4m3fn, {}, torch.bfloat16),
        (torch.int8, torch.int8, {}, torch.bfloat16),
        (torch.int8, torch.int8, {"out_dtype": torch.int32}, torch.int32),
        (torch.bfloat16, torch.bfloat16, {"out_dtype": torch.float32}, torch.float32),
        (torch.bfloat16, torch.bfloat16, {"out_dtype": torch.bfloat16}, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, {"out": torch.empty(4, N)}, torch.float32),
        (torch.float8_e4m3fn, torch.float8_e4m3fn, {"out": torch.empty(4, N).half()}, torch.float16),
    ],
)
def test_the_dtype_of_out(x, w, options, out):
    linear, counters, _ = served(FULL)
    a, b = (torch.randint(-3, 4, shape).to(dtype) for shape, dtype in (((4, K), x), ((N, K), w)))
    result = linear(a, b, **options)
    assert result.dtype == out
    assert relative_error(result.double(), a.double() @ b.double().T) < 1e-2
    assert counted(counters) == {"miss_family": 1}


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_dtypes_of_operands_and_out_choose_the_family(out):
    families = [
        replace(FP8, a_dtype=a, b_dtype=b, out_dtype=o)
        for a in (E4M3, E5M2)
        for b in (E4M3, E5M2)
        for o in ("bfloat16", "float32")
    ]
    plains = [replace(f, epilogue=Epilogue()) for f in families]
    linear, counters, kernels = served(*families, *plains, divisibility=16, raise_on_miss=True)
    wanted = [f for f in families if f.out_dtype == out]
    for family in wanted:
        call = call_of(family, 3)
        if out == "bfloat16":
            del call["out_dtype"]
        plain = replace(family, epilogue=Epilogue())
        for _ in range(2):
            close(linear(**call), expected(family, call), out)
            close(linear(call["x"], call["w"]), expected(plain, call))
    assert [f for f, k in kernels.items() if k.calls == 2 and f.epilogue] == wanted
    assert counted(counters) == {"kernel": 16}


@pytest.mark.parametrize(
    ("dtype", "divisibility", "n", "epilogue", "name"),
    [
        ("bfloat16", 8, 8, "swiglu", "fallback_divisibility"),
        ("bfloat16", 8, 24, "swiglu", "fallback_divisibility"),
        ("bfloat16", 8, 16, "swiglu", "kernel"),
        ("bfloat16", 8, 8, "bias", "kernel"),
        ("float32", 4, 8, "swiglu", "kernel"),
        ("float32", 4, 12, "swiglu", "fallback_divisibility"),
        (E4M3, 16, 24, "none", "fallback_divisibility"),
    ],
)
def test_rows_of_out_must_be_whole_units_of_alignment(dtype, divisibility, n, epilogue, name):
    family = ProblemFamily.of(n, K, dtype, epilogue, out="bfloat16" if dtype == E4M3 else None)
    linear, counters, _ = served(family, divisibility=divisibility)
    call = call_of(family, 4)
    close(linear(**call), expected(family, call), family.out_dtype)
    assert counted(counters) == {name: 1}


@pytest.mark.parametrize("a_layout", ["mk", "km"])
@pytest.mark.parametrize("b_layout", ["nk", "kn"])
@pytest.mark.parametrize("m", [1, 3, 16])
def test_transposed_views_are_layouts_where_the_bundle_has_them(a_layout, b_layout, m):
    families = [replace(PLAIN, a_layout=a, b_layout=b) for a in ("mk", "km") for b in ("nk", "kn")]
    linear, counters, kernels = served(*families)
    family = replace(PLAIN, a_layout=a_layout, b_layout=b_layout)
    call = call_of(family, m)
    for _ in range(2):
        close(linear(call["x"], call["w"]), expected(family, call))
    assert {f for f, k in kernels.items() if k.calls} == {family}
    assert counted(counters) == {"kernel": 2}


def test_transposed_views_of_a_layout_that_the_bundle_lacks_are_strides():
    linear, counters, kernels = served(PLAIN, replace(PLAIN, b_layout="kn"))
    x, w = data(4, K), data(N, K)
    close(linear(x.T.contiguous().T, w), expected(PLAIN, {"x": x, "w": w}))
    close(linear(x.T.contiguous().T, w.T.contiguous().T), expected(PLAIN, {"x": x, "w": w}))
    assert counted(counters) == {"fallback_strides": 2}
    assert not any(k.calls for k in kernels.values())


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"x": data(K, 20).T[:4]}, "fallback_strides"),
        ({"x": data(K * 16 + 1)[1:].view(K, 16).T[:4]}, "fallback_alignment"),
        ({"w": data(2, K, N).view(2 * K, N)[::2].T}, "kernel"),
        ({"w": data(K, 2 * N).T[::2]}, "fallback_strides"),
    ],
)
def test_transposed_views_have_the_same_limits(changes, name):
    family = replace(PLAIN, a_layout="km", b_layout="kn")
    linear, counters, _ = served(PLAIN, family)
    call = call_of(family, 4) | changes
    close(linear(call["x"], call["w"]), expected(family, call))
    assert counted(counters) == {name: 1}


def test_a_weight_gradient():
    """grad_out.T @ x: both operands are transposed views, and the tokens are k."""
    tokens, features, outputs = 32, 64, 16
    family = replace(ProblemFamily.of(features, tokens), a_layout="km", b_layout="kn")
    linear, counters, _ = served(family)
    grad_out, x = data(tokens, outputs), data(tokens, features)
    close(linear(grad_out.T, x.T), grad_out.float().T @ x.float())
    assert counted(counters) == {"kernel": 1}


@pytest.mark.parametrize("epilogue", ["none", "bias+gelu", "scale_row_column+bias+swiglu+residual", "scale_tensor"])
@pytest.mark.parametrize("a_layout", ["mk", "km"])
def test_batches_are_a_family_of_their_own(epilogue, a_layout):
    family = replace(ProblemFamily.of(N, K, epilogue=epilogue), batch=3, a_layout=a_layout)
    linear, counters, _ = served(family, replace(family, batch=1), choice=LIBRARY, raise_on_miss=True)
    call = call_of(family, 5)
    want = expected(family, call)
    assert want.shape == (3, 5, family.out_columns)
    close(linear(**call), want)
    out = torch.empty(want.shape, dtype=torch.bfloat16)
    assert linear(**call, out=out) is out
    close(out, want)
    assert counted(counters) == {"library": 2}
    with pytest.raises(MissError, match="batch 2"):
        linear(call["x"][:2], call["w"][:2])


def test_kernels_take_no_batches_but_one():
    family = ProblemFamily.of(N, K, epilogue="bias")
    linear, counters, _ = served(family, replace(family, batch=3))
    x, w, bias = data(3, 4, K), data(3, N, K), data(N)
    close(linear(x, w, bias), x.float() @ w.float().mT + bias.float())
    assert counted(counters) == {"fallback_batch": 1}
    one = linear(x[:1], w[:1], bias)
    close(one, x[:1].float() @ w[:1].float().mT + bias.float())
    assert counted(counters) == {"fallback_batch": 1, "kernel": 1}


@pytest.mark.parametrize(("b", "m", "k"), [(0, 4, K), (2, 0, K), (2, 4, 0)])
def test_empty_batches_give_what_torch_gives(b, m, k):
    linear, counters, _ = served(FULL)
    x, w, bias = data(b, m, k), data(b, N, k), data(N)
    torch.testing.assert_close(linear(x, w, bias), torch.matmul(x, w.mT) + bias)
    assert counted(counters) == {"fallback_empty": 1}


@pytest.mark.parametrize("epilogue", ["bias+gelu", "swiglu", "geglu+residual", "scale_row_column+bias+silu"])
def test_gradients_of_every_operand_are_torchs(epilogue):
    family = ProblemFamily.of(N, K, "fp32", epilogue)
    linear, counters, _ = served(family)
    call = call_of(family, 4)
    leaves = {name: t.requires_grad_() for name, t in call.items() if isinstance(t, torch.Tensor)}
    linear(**call).square().sum().backward()
    found = {name: t.grad for name, t in leaves.items()}
    for t in leaves.values():
        t.grad = None
    expected(family, call).square().sum().backward()
    for name, t in leaves.items():
        torch.testing.assert_close(found[name], t.grad, rtol=1e-3, atol=1e-3)
    assert counted(counters) == {"fallback_autograd": 1}


@pytest.mark.parametrize("family", [FULL, FP8, replace(FP8, epilogue=Epilogue(gate="geglu"))])
def test_a_traced_call_of_any_epilogue_is_torchs_own_in_one_graph(family):
    linear, counters, kernels = served(family, divisibility=16)
    call, serve = call_of(family, 4), linear.__call__
    traced = torch.compile(lambda call: serve(**call), backend="eager", fullgraph=True)
    with torch.inference_mode():
        close(traced(call), expected(family, call), family.out_dtype)
    assert counted(counters) == {}
    assert kernels[family].calls == 0


def test_the_message_of_a_miss_names_the_problem():
    linear, _, _ = served(PLAIN, raise_on_miss=True)
    call = full(3)
    with pytest.raises(MissError, match=rf"3x{N}x{K} bfloat16 scale_row_column\+bias\+swiglu\+residual \(family\)"):
        linear(**call)
