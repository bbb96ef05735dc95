"""What comes after a GEMM, in forward passes written by hand: what is fused, and what must not be."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

from gemmcache.models.after import After  # noqa: E402
from gemmcache.models.graph import Recorder  # noqa: E402

Tensor = torch.Tensor
Forward = Callable[..., object]
NONE, RESIDUAL = After(), After(residual=True)
SHAPE = (2, 3, 8)


def watched(forward: Forward) -> dict[str, After]:
    """`forward(x, g, u)` gets x[2, 3, 8] and linear layers g and u, 8 to 8, that can be called often."""
    recorder = Recorder()

    def linear(name: str) -> Callable[[Tensor], Tensor]:
        module = torch.nn.Linear(8, 8, device="meta")
        module.register_forward_hook(lambda module, args, out: recorder.gemm([name], args[0], out))
        return module

    g, u = linear("g"), linear("u")
    with torch.no_grad(), torch.device("meta"), recorder:
        recorder.read(forward(torch.empty(SHAPE), g, u))
    return recorder.after()


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (8,))


def gelu_tanh_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (F.relu, "relu"),
        (lambda x: x.clamp(min=0), "relu"),
        (torch.relu_, "relu"),
        (F.gelu, "gelu"),
        (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), "gelu"),
        (lambda x: F.gelu(x, approximate="tanh"), "gelu_tanh"),
        (gelu_tanh_by_hand, "gelu_tanh"),
        (F.silu, "silu"),
        (lambda x: x * torch.sigmoid(x), "silu"),
        (lambda x: F.silu(x.float()).to(x.dtype).transpose(0, 1), "silu"),
        # What is squared is the activation; that alone is fused.
        (lambda x: F.relu(x).square(), "relu"),
        (lambda x: x * torch.sigmoid(1.702 * x), None),
        (F.relu6, None),
        (lambda x: F.gelu(x).clamp(-10, 10), "gelu"),
        (lambda x: F.gelu(x.clamp(-10, 10)), None),
        (lambda x: F.silu(2 * x), None),
        (F.leaky_relu, None),
        (torch.tanh, None),
        (F.mish, None),
        (norm, None),
        (lambda x: F.silu(norm(x)), None),
        (lambda x: F.silu(x) + x.mean(), None),
        (lambda x: (F.silu(x), x), None),
        (lambda x: F.silu(x[:, 0]), None),
    ],
)
def test_activations_are_told_by_what_they_compute(activation: Callable[[Tensor], object], name: str | None) -> None:
    assert watched(lambda x, g, u: activation(g(x))) == {"g": After(name)}


@pytest.mark.parametrize(
    ("forward", "after"),
    [
        (lambda x, g, u: x + g(x), RESIDUAL),
        (lambda x, g, u: g(x) + x, RESIDUAL),
        (lambda x, g, u: norm(g(x) + x), RESIDUAL),
        (lambda x, g, u: g(x).add_(x), RESIDUAL),
        (lambda x, g, u: x.clone().add_(g(x)), RESIDUAL),
        (lambda x, g, u: F.dropout(g(x), training=False).float() * 1.0 + x, RESIDUAL),
        (lambda x, g, u: x.view(6, 8) + g(x.view(6, 8)), RESIDUAL),
        (lambda x, g, u: x.view(6, 8) + g(x).view(6, 8), RESIDUAL),
        (lambda x, g, u: x + F.silu(g(x)), After("silu", residual=True)),
        (lambda x, g, u: x + 0.5 * g(x), NONE),
        (lambda x, g, u: torch.add(x, g(x), alpha=2), NONE),
        (lambda x, g, u: x - g(x), NONE),
        (lambda x, g, u: x + norm(g(x)), NONE),
        # The sum of an output with what was made of it needs it twice.
        (lambda x, g, u: (y := g(x)) + y, NONE),
        (lambda x, g, u: (y := g(x)) + norm(y), NONE),
        (lambda x, g, u: (y := g(x), x + y), NONE),
        # Broadcast: a bias, positions of all sequences.
        (lambda x, g, u: g(x) + torch.empty(8), NONE),
        (lambda x, g, u: g(x) + torch.empty(1, 3, 8), NONE),
        (lambda x, g, u: g(x) + 1.0, NONE),
        # Rows of out are not rows of the residual.
        (lambda x, g, u: g(x).view(2, 3, 2, 4) + torch.empty(2, 3, 2, 4), NONE),
        (lambda x, g, u: g(x).transpose(1, 2) + x.transpose(1, 2), NONE),
        # In another order of rows, as windows are; or of columns; and what is swapped back is no simpler.
        (lambda x, g, u: x.transpose(0, 1).reshape(2, 3, 8) + g(x).transpose(0, 1).reshape(2, 3, 8), NONE),
        (lambda x, g, u: x + g(x).permute(1, 0, 2).reshape(2, 3, 8), NONE),
        (lambda x, g, u: x + F.silu(g(x)).transpose(0, 1).reshape(2, 3, 8), After("silu")),
        (lambda x, g, u: torch.empty(8, 8) + g(torch.empty(8, 8)).t(), NONE),
        (lambda x, g, u: x + g(x.transpose(0, 1)).unflatten(0, (3, 1)).reshape(2, 3, 8), RESIDUAL),
        # In another dtype than that of the output, before the sum or after it.
        (lambda x, g, u: x.double() + g(x), NONE),
        (lambda x, g, u: x.bfloat16() + g(x), NONE),
        (lambda x, g, u: x.double() + g(x).double(), NONE),
        (lambda x, g, u: x.bfloat16() + g(x).bfloat16(), NONE),
        (lambda x, g, u: x.double().add_(g(x)), NONE),
        (lambda x, g, u: x.double() + F.silu(g(x)), After("silu")),
        # Looked at on the way, as models do that clamp what overflows.
        (lambda x, g, u: (y := g(x)).isinf().any() and x + y, NONE),
    ],
)
def test_residuals_are_sums_with_a_whole_tensor(forward: Forward, after: After) -> None:
    assert watched(forward)["g"] == after


@pytest.mark.parametrize(
    ("forward", "g", "u"),
    [
        (lambda x, g, u: F.silu(g(x)) * u(x), After("silu", times="u"), NONE),
        (lambda x, g, u: u(x) * F.gelu(g(x)), After("gelu", times="u"), NONE),
        (lambda x, g, u: u(x).mul_(gelu_tanh_by_hand(g(x))), After("gelu_tanh", times="u"), NONE),
        (lambda x, g, u: g(x) * u(x), NONE, NONE),
        (lambda x, g, u: F.silu(g(x)) * x, After("silu"), NONE),
        (lambda x, g, u: F.silu(g(x)) * F.silu(u(x)), After("silu"), After("silu")),
        # Something else reads the up projection: it can't end in the gate.
        (lambda x, g, u: (F.silu(g(x)) * (y := u(x)), y), After("silu"), NONE),
        (lambda x, g, u: F.silu(y := g(x)) * u(y), NONE, NONE),
        (lambda x, g, u: F.silu(g(x)) * u(x) * 2, After("silu", times="u"), NONE),
        # Other elements of up than those of gate, both in the wrong order, and other inputs.
        (lambda x, g, u: F.silu(g(x).transpose(0, 1)) * u(x).reshape(3, 2, 8), After("silu"), NONE),
        (lambda x, g, u: F.silu(g(x)) * u(x).permute(1, 0, 2).reshape(2, 3, 8), After("silu"), NONE),
        (lambda x, g, u: F.silu(g(x)) * u(x + 1), After("silu"), NONE),
        (lambda x, g, u: F.silu(g(x)) * u(torch.empty(SHAPE)), After("silu"), NONE),
        (lambda x, g, u: F.silu(g(x)) * u(x.transpose(0, 1).reshape(SHAPE)), After("silu"), NONE),
        (lambda x, g, u: F.silu(g(x[:1])) * u(x), After("silu"), NONE),
        # The same input by another view of it.
        (lambda x, g, u: F.silu(g(x.view(6, 8))) * u(x.view(6, 8)), After("silu", times="u"), NONE),
        # Of two outputs that are added, the later one can take the earlier one.
        (lambda x, g, u: g(x) + u(x), NONE, RESIDUAL),
        (lambda x, g, u: x + g(x) + u(x), RESIDUAL, RESIDUAL),
        (lambda x, g, u: u(F.relu(g(x))) + x, After("relu"), RESIDUAL),
    ],
)
def test_two_gemms(forward: Forward, g: After, u: After) -> None:
    found = watched(forward)
    assert (found["g"], found.get("u", NONE)) == (g, u)


def _glu(order: int, cut: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Forward:
    def forward(x: Tensor, g: Callable[[Tensor], Tensor], u: object) -> Tensor:
        halves = cut(g(x))
        return F.silu(halves[order]) * halves[1 - order]

    return forward


@pytest.mark.parametrize(
    "cut",
    [
        lambda y: y.chunk(2, dim=-1),
        lambda y: y.split(4, dim=2),
        lambda y: y.split([4, 4], dim=-1),
        lambda y: (y[..., :4], y[..., 4:]),
        lambda y: (y[..., :-4], y[..., -4:]),
    ],
)
def test_a_stored_gate_is_taken_in_its_order_only(cut: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    assert watched(_glu(0, cut)) == {"g": After(gate="silu")}
    assert watched(_glu(1, cut)) == {"g": NONE}


@pytest.mark.parametrize(
    "cut",
    [
        lambda y: y.split([3, 5], dim=-1) and (y[..., :3], y[..., 3:6]),
        lambda y: (y[..., ::2], y[..., 1::2]),
        lambda y: (y[:1], y[1:]),
        lambda y: (y[..., 2:6], y[..., 4:]),
        lambda y: (2 * y).chunk(2, dim=-1),
        lambda y: y.transpose(0, 1).chunk(2, dim=-1),
        lambda y: y.view(2, 3, 2, 4).transpose(2, 3).reshape(2, 3, 8).chunk(2, dim=-1),
        lambda y: (y[..., :4], y[..., 4:].view(3, 2, 4).transpose(0, 1)),
    ],
)
def test_other_parts_are_no_halves(cut: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    assert watched(_glu(0, cut)) == {"g": NONE}


def test_what_gemms_read() -> None:
    def reads(forward: Forward) -> tuple[tuple[int, ...], tuple[int, ...]]:
        found = watched(forward)
        return found["g"].reads, found["u"].reads

    for same in (lambda x, g, u: (g(x), u(x)), lambda x, g, u: (g(x[None]), u(x.view(6, 8)), g(y := x + 1), u(y))):
        g, u = reads(same)
        assert g == u
    assert len(g) == 2
    for other in (
        lambda x, g, u: (g(x), u(x + 0)),
        lambda x, g, u: (g(x), u(x.transpose(0, 1))),
        lambda x, g, u: (g(x), u(x.double().float())),
        lambda x, g, u: (g(x), u(x.add_(1))),
        lambda x, g, u: (g(x), u(x), g(x + 1), u(x)),
        lambda x, g, u: (g(x), u(x), u(x)),
        lambda x, g, u: u(g(x)),
    ):
        g, u = reads(other)
        assert g != u


def test_narrow_gates_are_not_multiplied_in_the_gemm() -> None:
    """An output of one column, spread over those of another one."""
    recorder = Recorder()
    x, g, u = (torch.empty(shape, device="meta") for shape in ((3, 8), (3, 1), (3, 8)))
    with recorder:
        recorder.gemm(["g"], x, g)
        recorder.gemm(["u"], x, u)
        recorder.read(F.relu(g) * u)
    assert recorder.after() == {"g": After("relu"), "u": NONE}


def test_all_runs_of_a_layer_have_to_agree() -> None:
    assert watched(lambda x, g, u: F.relu(g(F.relu(g(x)))))["g"] == After("relu")
    assert watched(lambda x, g, u: F.silu(g(F.relu(g(x)))))["g"] == NONE


def test_questions_about_numbers_are_answered() -> None:
    seen = []

    def forward(x: Tensor, g: Callable[[Tensor], Tensor], u: object) -> Tensor:
        seen.append((bool(x.isfinite().all()), int(x.argmax()), x.max().item(), [*torch.nonzero(x).shape]))
        return F.relu(g(x))

    assert watched(forward) == {"g": After("relu")}
    assert seen == [(True, 1, 1.0, [1, 3])]
