"""The peers of the benchmark call what they stand for as it wants to be called, and compute the problem."""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest

from gemmcache.errors import MeasurementError
from gemmcache.problem import ProblemFamily
from gemmcache.records.interface import LIBRARY, OK, WRONG, Trial, TuningRecord
from tests.fakes import ENVIRONMENT, POLICY

torch = pytest.importorskip("torch")

from gemmcache.epilogue import Epilogue  # noqa: E402
from gemmcache.kernels.interface import Config  # noqa: E402
from gemmcache.library import library_op  # noqa: E402
from tools.peer_benchmark import all_peers  # noqa: E402
from tools.peers import kernel_peers, torch_peers  # noqa: E402
from tools.peers.bench import expected_of, flaw, make_inputs, numeric_error  # noqa: E402
from tools.peers.interface import PeerError  # noqa: E402

CPU = torch.device("cpu")
EPILOGUES = ["none", "bias", "relu", "bias+gelu", "bias+gelu_tanh", "silu", "swiglu", "bias+geglu", "residual"]
EPILOGUES += ["residual*0.5", "bias+residual", "bias+silu+residual", "bias+swiglu+residual"]


def family(epilogue="none", dtype="bfloat16", out=None, n=256, k=128):
    return ProblemFamily.of(n, k, dtype, epilogue, out)


FP8 = family("scale_row_column", "fp8", "bf16")


def error_of(peer, problem, sets=2):
    """The relative error of the peer on the last of some sets of inputs, so that no set is taken for another."""
    inputs = make_inputs(problem, sets, CPU, seed=3)
    call = peer.prepare(problem, inputs)
    assert call is not None
    inputs[-1].out.fill_(float("nan"))
    result = peer.comparable(problem, call(inputs[-1]), inputs[-1])
    return numeric_error(expected_of(problem, inputs[-1]), result)


# Inputs and the check


@pytest.mark.parametrize("scale", ["tensor", "row", "column", "row_column"])
def test_scales_have_the_shapes_that_every_peer_takes(scale):
    (made,) = make_inputs(family(f"scale_{scale}", "fp8", "bf16").at(3), 1, CPU, 0)
    rows, columns = 3 if "row" in scale else 1, 256 if "column" in scale else 1
    shapes = {"scale_a": (rows, 1), "scale_b": (1, columns)}
    assert {name: tuple(t.shape) for name, t in made.operands.items()} == {
        name: shapes[name] for name in Epilogue.parse(f"scale_{scale}").operands()
    }
    assert made.a.dtype == made.b.dtype == torch.float8_e4m3fn


def test_sets_of_inputs_are_independent_and_those_of_a_seed_are_the_same():
    problem = family("bias+residual").at(3)
    first, again = make_inputs(problem, 3, CPU, 5), make_inputs(problem, 3, CPU, 5)
    for name in ("a", "b"):
        tensors = [getattr(i, name) for i in first]
        assert not torch.equal(tensors[0], tensors[1])
        assert torch.equal(tensors[2], getattr(again[2], name))
    assert len({i.operands["residual"].data_ptr() for i in first}) == len({i.out.data_ptr() for i in first}) == 3
    assert abs(float(expected_of(problem, first[0]).std()) - 1.5) < 0.7


def test_another_shape_and_an_unwritten_element_are_infinitely_wrong():
    expected = torch.ones(4, 4)
    assert numeric_error(expected, torch.ones(4, 4, dtype=torch.bfloat16)) == 0
    assert numeric_error(expected, torch.ones(4, 8)) == float("inf")
    holed = torch.ones(4, 4)
    holed[3, 3] = float("nan")
    assert numeric_error(expected, holed) == float("inf")


def test_what_can_not_be_measured_is_told():
    assert flaw(family().at(1)) is None
    assert "batches" in flaw(replace(family(), batch=2).at(1))
    assert "layouts" in flaw(replace(family(), b_layout="kn").at(1))


# torch


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("peer", [torch_peers.Cublas(), torch_peers.Eager()], ids=lambda p: p.name)
def test_torch_peers_compute_the_problem(peer, epilogue):
    problem = family(epilogue).at(5)
    if peer.uncovered(problem) is None:
        assert error_of(peer, problem) < 0.01
    else:
        assert (peer.name, epilogue) in {("eager", "none"), ("eager", "bias")}


def test_cublas_takes_what_plain_ops_do_not():
    for wide in (family(out="float32"), family("scale_row", out="bf16"), family(dtype="int8", out="int32")):
        assert torch_peers.Cublas().uncovered(wide.at(3)) is None
        assert torch_peers.Eager().uncovered(wide.at(3)) is not None
        assert torch_peers.Inductor().uncovered(wide.at(3)) is not None
    assert error_of(torch_peers.Cublas(), family(out="float32").at(3)) < 0.01


@pytest.mark.parametrize("epilogue", ["none", "bias", "residual", "residual*0.5"])
def test_the_host_is_timed_on_torchs_own_op(epilogue):
    problem = family(epilogue).at(3)
    (inputs,) = make_inputs(problem, 1, CPU, 0)
    peer = torch_peers.Cublas()
    call = peer.prepare(problem, [inputs])
    host = peer.host_call(problem, call)
    assert host is not call
    assert numeric_error(expected_of(problem, inputs), host(inputs)) < 0.01


def test_the_host_is_timed_on_the_whole_call_where_torch_takes_several_ops():
    problem = family("bias+silu").at(3)
    call = torch_peers.Cublas().prepare(problem, [])
    assert torch_peers.Cublas().host_call(problem, call) is call


@pytest.mark.parametrize("gelu", [True, False])
def test_the_fused_activation_is_torchs(gelu, monkeypatch):
    seen = {}

    def fused(bias, a, b, *, use_gelu):
        seen.update(use_gelu=use_gelu)
        return torch.addmm(bias, a, b)

    monkeypatch.setattr(torch, "_addmm_activation", fused)
    problem = family("bias+gelu_tanh" if gelu else "bias+relu").at(3)
    (inputs,) = make_inputs(problem, 1, CPU, 0)
    assert torch_peers.direct_op(problem.family)(inputs).shape == (3, 256)
    assert seen == {"use_gelu": gelu}


@pytest.fixture
def scaled_mm(monkeypatch):
    """torch's scaled product, with the keywords of each call noted."""
    calls = []

    def scaled(a, b, scale_a, scale_b, *, out_dtype, out=None, **keywords):
        calls.append(keywords)
        value = ((a.float() @ b.float()) * scale_a * scale_b).to(out_dtype)
        return value if out is None else out.copy_(value)

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    return calls


def test_fast_accumulation_is_a_peer_of_its_own(scaled_mm):
    assert error_of(torch_peers.CublasFast(), FP8.at(3)) < 0.01
    assert scaled_mm == [{"use_fast_accum": True}]
    for other in (family(), family("bias+scale_row_column", "fp8", "bf16"), family(dtype="fp8", out="bf16")):
        assert torch_peers.CublasFast().uncovered(other.at(3))
    call = torch_peers.direct_op(FP8)
    call(make_inputs(FP8.at(3), 1, CPU, 0)[0])
    assert scaled_mm[-1] == {"use_fast_accum": False}


@pytest.mark.parametrize("epilogue", ["scale_row_column+bias", "scale_row_column+residual", "scale_tensor+relu"])
def test_the_eager_function_scales(epilogue, scaled_mm):
    problem = family(epilogue, "fp8", "bf16").at(3)
    assert torch_peers.eager_flaw(problem.family) is None
    (inputs,) = make_inputs(problem, 1, CPU, 0)
    result = torch_peers.eager_function(problem.family)(inputs.a, inputs.b, **inputs.operands)
    assert numeric_error(expected_of(problem, inputs), result) < 0.01
    assert len(scaled_mm) == 1


def test_inductor_compiles_each_problem_anew_with_its_best_tuning(monkeypatch):
    asked, resets = [], []

    def compiled(function, **keywords):
        asked.append(keywords)
        return function

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(len(asked)))
    assert error_of(torch_peers.Inductor(), family("bias+swiglu").at(3)) < 0.01
    assert error_of(torch_peers.Inductor(), family("none").at(3)) < 0.01
    assert asked == [{"mode": "max-autotune-no-cudagraphs", "dynamic": False, "fullgraph": True}] * 2
    assert resets == [0, 1]


@pytest.mark.parametrize("epilogue", ["none", "bias+gelu_tanh", "swiglu+residual*0.5"])
def test_the_eager_function_is_one_graph(epilogue):
    problem = family(epilogue).at(3)
    (inputs,) = make_inputs(problem, 1, CPU, 0)
    torch._dynamo.reset()
    traced = torch.compile(torch_peers.eager_function(problem.family), backend="eager", fullgraph=True, dynamic=False)
    result = traced(inputs.a, inputs.b, **inputs.operands)
    assert numeric_error(expected_of(problem, inputs), result) < 0.01


# quack


def fake_quack():
    """The functions of quack's interface as its documentation has them, by torch; out is written."""
    acts = {None: lambda x: x, "relu": torch.relu, "silu": torch.nn.functional.silu}
    acts["gelu_tanh_approx"] = lambda x: torch.nn.functional.gelu(x, approximate="tanh")

    def product(a, b, bias):
        value = a.float() @ b.float()
        return value if bias is None else value + bias

    def gemm(A, B, out=None, bias=None):
        return out.copy_(product(A, B, bias))

    def gemm_add(A, B, C, out=None, bias=None, beta=1.0):
        return out.copy_(product(A, B, bias) + beta * C)

    def gemm_act(A, B, C=None, bias=None, activation=None, postact_out=None, store_preact=True):
        assert C is None
        assert not store_preact
        return None, postact_out.copy_(acts[activation](product(A, B, bias)))

    def gemm_gated(A, B, C=None, bias=None, activation=None, postact_out=None, store_preact=True, concat_layout=None):
        assert (C, activation, store_preact) == (None, "swiglu", False)
        value = product(A, B, bias)
        if concat_layout:
            assert set(concat_layout) == ({"B"} if bias is None else {"B", "bias"})
            first, second = value.chunk(2, -1)
        else:
            first, second = value[:, ::2], value[:, 1::2]
        return None, postact_out.copy_(acts["silu"](first) * second)

    return SimpleNamespace(gemm=gemm, gemm_add=gemm_add, gemm_act=gemm_act, gemm_gated=gemm_gated)


@pytest.fixture
def quack(monkeypatch):
    module = ModuleType("quack")
    module.gemm_interface = ModuleType("quack.gemm_interface")
    vars(module.gemm_interface).update(vars(fake_quack()))
    monkeypatch.setitem(sys.modules, "quack", module)
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", module.gemm_interface)


COVERED = ["none", "bias", "relu", "bias+silu", "bias+gelu_tanh", "swiglu", "bias+swiglu", "residual*0.5"]
COVERED += ["residual", "bias+residual"]


@pytest.mark.parametrize("epilogue", COVERED)
def test_quack_is_called_for_what_it_covers(epilogue, quack):
    problem = family(epilogue).at(5)
    assert kernel_peers.Quack().uncovered(problem) is None
    assert error_of(kernel_peers.Quack(), problem) < 0.01


@pytest.mark.parametrize("epilogue", ["swiglu", "bias+swiglu"])
def test_quack_takes_interleaved_weights_too(epilogue, quack):
    assert kernel_peers.QuackInterleaved().uncovered(family(epilogue).at(5)) is None
    assert error_of(kernel_peers.QuackInterleaved(), family(epilogue).at(5)) < 0.01


@pytest.mark.parametrize("epilogue", ["gelu", "geglu", "silu+residual", "swiglu+residual", "scale_row"])
def test_quack_is_not_called_for_what_it_computes_otherwise(epilogue):
    assert kernel_peers.Quack().uncovered(family(epilogue).at(5))
    assert kernel_peers.QuackInterleaved().uncovered(family(epilogue).at(5))
    assert kernel_peers.Quack().uncovered(FP8.at(5))
    assert kernel_peers.QuackInterleaved().uncovered(family("bias").at(5)) == "the same as quack"


def test_the_stand_in_has_the_parameters_of_the_installed_quack():
    found = find_spec("quack")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("quack is not installed")
    with open(f"{found.submodule_search_locations[0]}/gemm_interface.py") as file:
        tree = ast.parse(file.read())
    real = {node.name: [a.arg for a in node.args.args] for node in tree.body if isinstance(node, ast.FunctionDef)}
    aliases = {
        n.targets[0].id: n.value.id for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Name)
    }
    for name, stand_in in vars(fake_quack()).items():
        parameters = real[aliases.get(name, name)]
        ours = list(inspect.signature(stand_in).parameters)
        assert set(ours) <= set(parameters), name
        assert parameters[:3] == ours[:3], name


# DeepGEMM


@pytest.fixture
def deep_gemm(monkeypatch):
    module = ModuleType("deep_gemm")
    module.aligned = 0

    def fp8_gemm_nt(a, b, d):
        (x, x_scale), (w, w_scale) = a, b
        assert x_scale.shape == (x.shape[0], x.shape[1] // 128)
        assert w_scale.shape == (w.shape[0] // 128, w.shape[1] // 128)
        wide = w.float() * w_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        d.copy_((x.float() * x_scale.repeat_interleave(128, 1)) @ wide.t())

    def get_mn_major_tma_aligned_tensor(scales):
        module.aligned += 1
        return scales

    module.bf16_gemm_nt = lambda a, b, d: d.copy_(a.float() @ b.float().t())
    module.fp8_gemm_nt, module.get_mn_major_tma_aligned_tensor = fp8_gemm_nt, get_mn_major_tma_aligned_tensor
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    return module


def test_deepgemm_computes_the_problem(deep_gemm):
    peer = kernel_peers.DeepGemm()
    fp8 = family("scale_row_column", "fp8", "bf16", k=256)
    for problem in (family().at(5), fp8.at(5)):
        assert peer.uncovered(problem) is None
        assert error_of(peer, problem) < 0.01
    assert deep_gemm.aligned == 2  # once for each set of inputs, not in the calls


def test_deepgemms_own_product_is_checked_and_is_not_ranked(deep_gemm):
    peer = kernel_peers.DeepGemmBlock()
    problem = family("scale_row_column", "fp8", "bf16", k=256).at(5)
    assert not peer.ranked
    assert peer.uncovered(family().at(5)) == "the same as deepgemm"
    assert error_of(peer, problem) < 0.01
    assert "another problem" in peer.note(problem)


@pytest.mark.parametrize(
    "other",
    [
        family("bias"),
        family(dtype="fp16"),
        family("scale_row", "fp8", "bf16"),
        family(dtype="fp8", out="bf16"),
        family("scale_row_column", "fp8", "bf16", k=192),
        family("scale_row_column", "fp8", "bf16", n=192),
    ],
    ids=str,
)
def test_deepgemm_is_not_called_for_what_it_does_not_compute(other):
    assert kernel_peers.DeepGemm().uncovered(other.at(5))


def test_what_is_not_installed_is_said_and_nothing_is_imported(monkeypatch):
    monkeypatch.setattr(kernel_peers, "find_spec", lambda name: None)
    monkeypatch.setattr(torch_peers, "find_spec", lambda name: None)
    absent = {peer.name: peer.available() for peer in all_peers(None, None)}
    assert {name for name, reason in absent.items() if reason is None} == {"cublas", "cublas-fast", "eager"}
    assert absent["deepgemm"] == absent["deepgemm-block"] == "not installed: deep_gemm"
    assert absent["operators"].startswith("no --records")
    assert absent["gemmcache"] == "no bundle given"
    assert "deep_gemm" not in sys.modules


def test_versions_are_those_of_what_is_measured():
    from gemmcache._version import __version__

    versions = {peer.name: peer.version() for peer in all_peers(None, None)}
    assert versions["gemmcache"] == __version__
    assert versions["eager"] == str(torch.__version__)


# operators


def trial(config, us, status=OK):
    return Trial(config, status, (us,), 0.001)


def recorded(problem, *trials, library_us=10.0):
    return TuningRecord(problem, ENVIRONMENT, POLICY, LIBRARY, trials, "cublas", (library_us,), "2026-12-01T00:00:00Z")


def test_the_best_config_of_the_records_is_taken():
    problem, other = family().at(5), family().at(6)
    fast, slow = (Config.of("operators", tile=(64, tile)) for tile in (64, 128))
    records = [
        recorded(problem, trial(Config.of("quack", tile=(64, 64)), 1.0), trial(slow, 12.0)),
        # A slower GPU: the ratio counts, not the time.
        recorded(problem, trial(fast, 20.0), library_us=30.0),
        recorded(other, trial(fast, 1.0, WRONG)),
    ]
    peer = kernel_peers.Operators(records)
    assert peer.available() is None
    assert peer.uncovered(problem) is None
    assert peer.uncovered(other) == "no trial of it in the records"
    assert peer.note(problem) == f"{fast}, 1.500 x cuBLAS in the records"


def test_operators_need_a_device():
    problem = family().at(5)
    config = Config.of("operators", tile=(64, 64))
    peer = kernel_peers.Operators([recorded(problem, trial(config, 12.0))])
    with pytest.raises(PeerError, match="CUDA device"):
        peer.prepare(problem, make_inputs(problem, 1, CPU, 0))


# gemmcache


class FakeBundle:
    """A bundle whose calls go to the library, with the signature of `bundle.linear`."""

    def __init__(self):
        self.keywords = []
        self.dispatchers = {}

    def linear(
        self,
        x,
        w,
        bias=None,
        activation=None,
        residual=None,
        out=None,
        *,
        gate=None,
        scale_a=None,
        scale_b=None,
        out_dtype=None,
    ):
        given = {"bias": bias, "residual": residual, "scale_a": scale_a, "scale_b": scale_b}
        operands = {name: t for name, t in given.items() if t is not None}
        self.keywords.append({*operands, *(["out"] if out is not None else [])})
        epilogue = Epilogue(
            scale="row_column" if scale_a is not None else None,
            bias=bias is not None,
            activation=activation,
            gate=gate,
            residual=residual is not None,
        )
        return library_op(epilogue, out_dtype or x.dtype, x, w, operands, out)


@pytest.fixture
def bundle(monkeypatch):
    import gemmcache

    loaded, opened = FakeBundle(), []
    monkeypatch.setattr(gemmcache, "load", lambda path: opened.append(path) or loaded, raising=False)
    yield loaded
    assert opened == ["some/bundle"]


@pytest.mark.parametrize("problem", [*(family(e).at(5) for e in EPILOGUES if "*" not in e), FP8.at(5)], ids=str)
def test_gemmcache_is_called_as_a_model_would(problem, bundle):
    peer = kernel_peers.Gemmcache("some/bundle")
    assert peer.available() is None
    assert peer.uncovered(problem) is None
    assert error_of(peer, problem) < 0.01
    assert error_of(peer, problem) < 0.01  # the bundle is loaded once
    assert bundle.keywords[0] == set(problem.family.epilogue.operands())


def test_gemmcache_has_no_factor_of_the_residual():
    assert "0.5" in kernel_peers.Gemmcache("some/bundle").uncovered(family("residual*0.5").at(5))


def test_what_serves_a_problem_is_noted():
    peer = kernel_peers.Gemmcache("some/bundle")
    choices = {
        1: SimpleNamespace(function=print, entry=object(), where="inside"),
        2: SimpleNamespace(function=None, entry=object(), where="inside"),
        3: SimpleNamespace(function=None, entry=None, where="between"),
    }
    peer.bundle = SimpleNamespace(dispatchers={family(): SimpleNamespace(choose=choices.__getitem__)})
    assert [peer.note(family().at(m)) for m in choices] == ["kernel", "library", "library: m between the tuned ones"]
    assert peer.note(family("bias").at(1)) == "library: family not in the bundle"


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", ["none", "bias+gelu_tanh", "swiglu"])
def test_a_problem_on_a_device(epilogue):
    from gemmcache.records.interface import MeasurementPolicy
    from tools.peers.bench import CudaBench
    from tools.peers.run import Runner, Settings

    device = torch.device("cuda", torch.cuda.current_device())
    problem = family(epilogue, n=4096, k=4096).at(16)

    class Uncapturable(torch_peers.Eager):
        name = "uncapturable"

        def uncovered(self, problem):
            return None

        def prepare(self, problem, inputs):
            call = super().prepare(problem, inputs)
            return lambda i: (torch.cuda.synchronize(), call(i))[1]

    runner = Runner(
        [torch_peers.Cublas(), Uncapturable()],
        lambda problem: CudaBench(problem, MeasurementPolicy(), device),
        Settings(rounds=3),
    )
    (row,) = runner.run([problem])
    assert {name: (cell.status, cell.mode) for name, cell in row.cells.items()} == {
        "cublas": ("ok", "graph"),
        "uncapturable": ("ok", "eager-timed"),
    }
    assert all(5 < cell.us < 1000 and cell.host_us > 1 for cell in row.cells.values())
    with pytest.raises(MeasurementError, match="batches"):
        CudaBench(replace(problem.family, batch=2).at(1), MeasurementPolicy(), device)
