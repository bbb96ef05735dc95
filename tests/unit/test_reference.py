"""The torch reference, the library's way and the distance between them, against formulas written out."""

from __future__ import annotations

import math

import pytest
import torch

from gemmcache.epilogue import ACTIVATIONS, GATES, SCALES, Epilogue
from gemmcache.errors import UsageError
from gemmcache.problem import ProblemFamily
from gemmcache.reference import library, library_op, reference, relative_error

M, N, K = 17, 32, 48
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EPILOGUES = [
    "none",
    "bias",
    *ACTIVATIONS,
    *GATES,
    "residual",
    "residual*-0.5",
    "residual*0",
    *(f"scale_{s}" for s in SCALES),
    *(f"bias+{a}" for a in ACTIVATIONS),
    "bias+swiglu+residual*0.25",
    "bias+residual",
    "bias+relu+residual*2",
    "gelu_tanh+residual",
    "scale_row_column+bias+geglu+residual",
    "scale_tensor+bias+relu",
]


def make(epilogue: str, dtype: torch.dtype = torch.float32, device: str = "cpu", m: int = M, n: int = N, k: int = K):
    """a, b and operands of moderate size for an epilogue."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    steps = Epilogue.parse(epilogue)
    shapes = {
        "scale_a": (1,) if steps.scale == "tensor" else (m,),
        "scale_b": (1,) if steps.scale == "tensor" else (n,),
        "bias": (n,),
        "residual": (m, steps.out_columns(n)),
    }
    a, b = random(m, k), random(n, k) / math.sqrt(k)
    return a, b, {name: random(*shapes[name]) for name in steps.operands()}


def act(name: str, x: torch.Tensor) -> torch.Tensor:
    """The activations by their definitions."""
    if name == "relu":
        return x * (x > 0)
    if name == "silu":
        return x / (1 + torch.exp(-x))
    if name == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def by_hand(epilogue: str, a: torch.Tensor, b: torch.Tensor, operands: dict[str, torch.Tensor]) -> torch.Tensor:
    """out in float64, step by step in the order that the text of a canonical epilogue has."""
    x = torch.einsum("mk,nk->mn", a.double(), b.double())
    o = {name: t.double() for name, t in operands.items()}
    for step in epilogue.split("+"):
        if step == "scale_tensor":
            x = x * o["scale_a"].item() * o["scale_b"].item()
        elif step.startswith("scale_"):
            if "row" in step:
                x = x * o["scale_a"][:, None]
            if "column" in step:
                x = x * o["scale_b"][None, :]
        elif step == "bias":
            x = x + o["bias"][None, :]
        elif step in ACTIVATIONS:
            x = act(step, x)
        elif step in GATES:
            half = x.shape[1] // 2
            x = act("silu" if step == "swiglu" else "gelu", x[:, :half]) * x[:, half:]
        elif step.startswith("residual"):
            x = x + float(step.partition("*")[2] or 1) * o["residual"]
    return x


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_reference_follows_the_formula(epilogue):
    a, b, operands = make(epilogue)
    family = ProblemFamily.of(N, K, "float32", epilogue)
    expected = by_hand(epilogue, a, b, operands)
    exact = reference(family, a, b, operands, torch.float64)
    assert exact.dtype == torch.float64
    torch.testing.assert_close(exact, expected, rtol=1e-12, atol=1e-12)
    single = reference(family, a, b, operands)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_library_agrees_with_the_reference(epilogue, dtype, with_out, device):
    a, b, operands = make(epilogue, getattr(torch, dtype), device)
    family = ProblemFamily.of(N, K, dtype, epilogue)
    out = torch.full((M, family.out_columns), math.nan, dtype=a.dtype, device=device) if with_out else None
    result = library(family, a, b, operands, out)
    assert result.dtype == a.dtype
    assert result.shape == (M, family.out_columns)
    assert out is None or result is out
    bound = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-3 if device == "cuda" else 1e-5}[dtype]
    assert relative_error(result, reference(family, a, b, operands)) < bound


@pytest.mark.parametrize("epilogue", ["residual", "residual*0.5", "bias+relu+residual", "swiglu+residual"])
def test_library_takes_out_as_its_residual(epilogue):
    a, b, operands = make(epilogue)
    family = ProblemFamily.of(N, K, "float32", epilogue)
    expected = library(family, a, b, operands)
    out = operands["residual"].clone()
    library(family, a, b, {**operands, "residual": out}, out)
    torch.testing.assert_close(out, expected)


def test_a_residual_of_nan_shows_even_with_beta_0():
    a, b, operands = make("residual*0")
    operands["residual"][0, 0] = math.nan
    family = ProblemFamily.of(N, K, "float32", "residual*0")
    assert library(family, a, b, operands)[0, 0].isnan()
    assert reference(family, a, b, operands)[0, 0].isnan()


@pytest.mark.parametrize("layouts", [("km", "kn", "nm"), ("mk", "kn", "mn"), ("km", "nk", "nm")])
def test_layouts_are_strides_of_the_same_values(layouts):
    a, b, operands = make("bias+silu")
    plain = ProblemFamily.of(N, K, "float32", "bias+silu")
    other = ProblemFamily(N, K, "float32", "float32", "float32", "float32", 1, *layouts, epilogue=plain.epilogue)
    if layouts[0] == "km":
        a = a.t().contiguous().t()
    if layouts[1] == "kn":
        b = b.t().contiguous().t()
    result = library(other, a, b, operands)
    assert result.stride() == ((1, M) if layouts[2] == "nm" else (N, 1))
    torch.testing.assert_close(result, library(plain, a, b, operands))
    torch.testing.assert_close(result, reference(other, a, b, operands))


def test_a_batch_goes_in_front():
    a, b, operands = torch.randn(3, M, K), torch.randn(3, N, K), {"bias": torch.randn(N)}
    family = ProblemFamily(
        N, K, "float32", "float32", "float32", batch=3, epilogue=Epilogue(bias=True, activation="gelu")
    )
    expected = torch.stack([act("gelu", a[i] @ b[i].t() + operands["bias"]) for i in range(3)])
    torch.testing.assert_close(reference(family, a, b, operands), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(library(family, a, b, operands), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", ["none", "scale_tensor", "scale_row", "scale_column", "scale_row_column"])
@pytest.mark.parametrize("k", [K, K + 8])
def test_float8_operands(scale, k, device):
    a, b, operands = make(scale, device=device, k=k)
    a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    family = ProblemFamily.of(N, k, "fp8", scale, out="bfloat16")
    result = library(family, a, b, operands)
    assert result.dtype == torch.bfloat16
    assert relative_error(result, reference(family, a, b, operands)) < 1e-2
    assert relative_error(result, by_hand(scale, a.float(), b.float(), operands)) < 1e-2


def test_int8_operands_are_exact():
    k = 4096
    a = torch.full((3, k), 127, dtype=torch.int8)
    b = torch.full((8, k), -127, dtype=torch.int8)
    family = ProblemFamily.of(8, k, "int8", out="int32")
    assert library(family, a, b, {}).eq(-127 * 127 * k).all()
    assert reference(family, a, b, {}, torch.float64).eq(-127 * 127 * k).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_wider_out_dtype(device):
    a, b, operands = make("bias", torch.bfloat16, device)
    family = ProblemFamily.of(N, K, "bfloat16", "bias", out="float32")
    result = library(family, a, b, operands)
    assert result.dtype == torch.float32
    assert relative_error(result, reference(family, a, b, operands)) < 1e-2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("epilogue", ["none", "bias", "bias+relu", "bias+gelu_tanh", "residual", "bias+swiglu"])
@pytest.mark.parametrize("shape", [(0, 8, 8), (5, 0, 8), (5, 8, 0)])
def test_a_dimension_of_0_gives_what_torch_gives(epilogue, shape, device):
    m, n, k = shape
    a = torch.ones(m, k, dtype=torch.bfloat16, device=device)
    b = torch.ones(n, k, dtype=torch.bfloat16, device=device)
    steps = Epilogue.parse(epilogue)
    columns = steps.out_columns(n)
    operands = {}
    if steps.bias:
        operands["bias"] = torch.ones(n, dtype=torch.bfloat16, device=device)
    if steps.residual:
        operands["residual"] = torch.ones(m, columns, dtype=torch.bfloat16, device=device)
    result = library_op(steps, torch.bfloat16, a, b, operands)
    assert result.shape == (m, columns)
    if k == 0 and result.numel():
        one = torch.tensor(1.0)
        expected = {
            "none": 0.0,
            "bias": 1.0,
            "bias+relu": 1.0,
            "bias+gelu_tanh": float(act("gelu_tanh", one)),
            "residual": 1.0,
            "bias+swiglu": float(act("silu", one)),
        }[epilogue]
        torch.testing.assert_close(result.float(), torch.full_like(result, expected).float(), atol=0.01, rtol=0.01)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("epilogue", ["none", "bias", "bias+relu", "bias+gelu_tanh", "silu", "residual", "swiglu"])
def test_gradients_flow_through_the_library(epilogue, device):
    a, b, operands = make(epilogue, device=device)
    a.requires_grad_()
    family = ProblemFamily.of(N, K, "float32", epilogue)
    library(family, a, b, operands).sum().backward()
    x = a.detach().clone().requires_grad_()
    by_hand(epilogue, x, b, operands).sum().backward()
    torch.testing.assert_close(a.grad, x.grad.to(a.dtype), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(
    ("epilogue", "change", "message"),
    [
        ("bias", {"bias": torch.ones(1, N)}, r"bias is \[1, 32\], not \[32\]"),
        ("bias", {"bias": torch.ones(N + 1)}, "bias is"),
        ("bias", {"bias": None}, "takes bias, not none"),
        ("none", {"bias": torch.ones(N)}, "takes no operands, not bias"),
        ("residual", {"residual": torch.ones(M, 1)}, "residual is"),
        ("swiglu+residual", {"residual": torch.ones(M, N)}, "residual is"),
        ("scale_tensor", {"scale_a": torch.ones(M)}, "scale_a is"),
        ("scale_row", {"scale_a": torch.ones(1)}, "scale_a is"),
        ("scale_column", {"scale_b": torch.ones(M)}, "scale_b is"),
    ],
)
def test_operands_that_are_not_the_epilogues_are_refused(epilogue, change, message):
    a, b, operands = make(epilogue)
    operands = {k: v for k, v in {**operands, **change}.items() if v is not None}
    family = ProblemFamily.of(N, K, "float32", epilogue)
    for function in (library, reference):
        with pytest.raises(UsageError, match=message):
            function(family, a, b, operands)


def test_shapes_that_do_not_fit_are_refused():
    a, b, _ = make("none")
    family = ProblemFamily.of(N, K, "float32")
    with pytest.raises(UsageError, match="are not"):
        library(family, a[:, 1:], b, {})
    with pytest.raises(UsageError, match="are not"):
        reference(family, a[0], b, {})
    for out in (torch.empty(M, N + 1), torch.empty(M, N, dtype=torch.float16)):
        with pytest.raises(UsageError, match="out is"):
            library(family, a, b, {}, out)


def test_relative_error():
    ref = torch.tensor([[3.0, 4.0]])
    assert relative_error(ref.clone(), ref) == 0.0
    assert relative_error(torch.tensor([[3.0, 4.5]]), ref) == pytest.approx(0.1)
    assert relative_error(-ref, ref) == pytest.approx(2.0)
    zero = torch.zeros(1, 2)
    assert relative_error(zero, zero) == 0.0
    assert relative_error(ref, zero) == math.inf
    assert relative_error(zero, ref) == pytest.approx(1.0)
    assert relative_error(torch.empty(0, 4), torch.empty(0, 4)) == 0.0
    with pytest.raises(UsageError, match="reference"):
        relative_error(torch.ones(2, 1), ref)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_relative_error_of_values_that_are_not_finite(bad):
    ref = torch.tensor([3.0, 4.0, 12.0])
    broken = torch.tensor([3.0, 4.0, bad])
    assert relative_error(broken, ref) == math.inf
    assert relative_error(ref, broken) == math.inf
    # Where the reference has the very same value, the rest decides.
    assert relative_error(broken, broken) == 0.0
    assert relative_error(torch.tensor([3.0, 4.5, bad]), broken) == pytest.approx(0.1)


def test_relative_error_does_not_overflow_or_cancel():
    huge = torch.full((64,), 1e30)
    assert relative_error(huge * 1.5, huge) == pytest.approx(0.5)
    exact = torch.ones(4, dtype=torch.float64)
    assert relative_error(exact + 1e-12, exact) == pytest.approx(1e-12, rel=1e-3)
