"""The operators' kernels, compiled for real, for every kernel, epilogue and dtype; and what the epilogues compute."""

from __future__ import annotations

import json
import os
import re

import pytest

from gemmcache.build.compile import compile_kernels
from gemmcache.build.link import link
from gemmcache.build.objects import ObjectCache
from gemmcache.bundle import elf
from gemmcache.bundle.interface import function_name, symbol_name
from gemmcache.codec import bytes_digest
from gemmcache.epilogue import Epilogue
from gemmcache.kernels.identity import detect_toolchain, kernel_digest
from gemmcache.kernels.operators import OperatorsFamily
from gemmcache.problem import ProblemFamily
from gemmcache.runtime.native import load_module
from gemmcache.target import TARGETS, detect_host
from tests.integration.commands import environment, needs_compiler, python
from tests.integration.test_kernels import gpu_arch

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.compile, needs_compiler]

FAMILY = OperatorsFamily()
#: Every step that is fused, alone and with those around it.
EPILOGUES = (
    "relu", "gelu", "gelu_tanh", "silu", "bias", "bias+relu", "bias+gelu_tanh", "residual*-0.5", "bias+residual",
    "bias+silu+residual", "scale_tensor", "scale_column+bias",
)  # fmt: skip
#: (target, dtype, out dtype) of bare products; bfloat16 on sm_80 and sm_90a is what `test_kernels.py` has.
PRODUCTS = (
    ("a100", "float16", "float16"),
    ("h200", "float16", "float32"),
    ("h200", "float8_e4m3fn", "bfloat16"),
    ("h200", "float8_e5m2", "float16"),
    ("h200", "float8_e4m3fn", "float32"),
    ("h200", "int8", "int32"),
    ("b200", "bfloat16", "bfloat16"),
    ("b200", "float8_e4m3fn", "bfloat16"),
    ("b200", "float8_e5m2", "float32"),
    ("b200", "int8", "int32"),
)


def wanted():
    """(target, family of problems, config): every kernel of each product, and each epilogue in one operand order."""
    for name, dtype, out in PRODUCTS:
        family, seen = ProblemFamily.of(4096, 4096, dtype, out=out), set()
        for config in FAMILY.configs(family, TARGETS[name]):
            if config["kernel"] not in seen:
                seen.add(config["kernel"])
                yield name, family, config
    for i, epilogue in enumerate(EPILOGUES):
        scaled = epilogue.startswith("scale")
        family = ProblemFamily.of(4096, 4096, "float8_e4m3fn" if scaled else "bfloat16", epilogue, "bfloat16")
        # Swapped operands, and pairs of CTAs, by turns.
        chosen = (bool(i % 2), bool(i // 2 % 2))
        configs = FAMILY.configs(family, TARGETS["b200"])
        yield "b200", family, next(c for c in configs if (c["swap_ab"], c["two_cta"]) == chosen)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Specs and objects by digest."""
    toolchain, host = detect_toolchain([FAMILY]), detect_host()
    specs = {}
    for name, family, config in wanted():
        spec = FAMILY.spec(config, family, TARGETS[name])
        specs[kernel_digest(spec, toolchain, host)] = spec
    objects, errors = compile_kernels(specs, ObjectCache(tmp_path_factory.mktemp("objects")), jobs=2)
    assert errors == {}
    return specs, objects


def test_every_kernel_epilogue_and_dtype_compiles_for_its_own_arch(compiled):
    specs, objects = compiled
    assert objects.keys() == specs.keys()
    assert {s.epilogue for s in specs.values() if s.arch == "sm_100a"} == {"none", *EPILOGUES}
    kernels = {"sm80", "sm90", "sm100", "sm100_preferred", "sm100_tgv", "sm100_fused"}
    assert {s.config["kernel"] for s in specs.values()} == kernels
    numbers = {"sm_80": 80, "sm_90a": 90, "sm_100a": 100}
    for digest, data in objects.items():
        linked = link({digest: data})
        assert symbol_name(function_name(digest)) in elf.exports(linked)
        assert {gpu_arch(image) for image in elf.gpu_images(linked)} == {numbers[specs[digest].arch]}


def arguments(spec):
    """CPU tensors that are right but for their device."""
    m, n, k = 3, 128, 64
    shapes = {"scale_a": (1,), "scale_b": (1,) if "scale_tensor" in spec.epilogue else (n,), "bias": (n,)}
    kinds = [getattr(torch, d) for d in (spec.a_dtype, spec.b_dtype, spec.out_dtype)]
    tensors = [torch.zeros(s, dtype=d) for s, d in zip(((m, k), (n, k), (m, n)), kinds, strict=True)]
    for name in Epilogue.parse(spec.epilogue).operands():
        kind = torch.float32 if name.startswith("scale") else kinds[2]
        tensors.append(torch.zeros(shapes.get(name, (m, n)), dtype=kind))
    return tensors


#: Sizes and dtype of a parameter, in the words of the exported functions.
DECLARED = re.compile(r"Tensor\(\[([^]]*)\], (\w+)\)")


def declared(spec):
    m, n, k = "n0", "n2", "n1"
    vectors = {"scale_a": "1", "scale_b": "1" if "scale_tensor" in spec.epilogue else n, "bias": n}
    operands = [
        (vectors.get(name, f"{m}, {n}"), "float32" if name.startswith("scale") else spec.out_dtype)
        for name in Epilogue.parse(spec.epilogue).operands()
    ]
    return [(f"{m}, {k}", spec.a_dtype), (f"{n}, {k}", spec.b_dtype), (f"{m}, {n}", spec.out_dtype), *operands]


def test_the_exported_functions_take_the_operands_of_the_epilogue_and_check_them(compiled):
    specs, objects = compiled
    data = link(objects)
    module = load_module(bytes_digest(data), lambda: _memory(data), 13)
    for digest, spec in specs.items():
        function, tensors = module.function(function_name(digest)), arguments(spec)
        with pytest.raises((ValueError, RuntimeError), match="device") as refused:
            function(*tensors)
        assert DECLARED.findall(str(refused.value)) == declared(spec)
        for wrong in (tensors[:-1], [*tensors, tensors[-1]]):
            with pytest.raises(TypeError, match=f"Expects {len(tensors)} parameters"):
                function(*wrong)


def _memory(data):
    fd = os.memfd_create("gemmcache-test")
    os.write(fd, data)
    return fd


#: The operators evaluate a fused function on a CPU too: the steps given to kernels, in torch.
EVALUATE = """
import json, sys
import torch
import cutlass
from cutlass.cute.runtime import make_fake_tensor
from cutlass.operators.providers.cutedsl.evt.efc import create_named_epilogue
from cutlass.operators.providers.cutedsl.gemm.implementations import sm100_static_persistent_efc_impl as efc
from gemmcache.epilogue import Epilogue
from gemmcache.kernels.operators import entry
from gemmcache.problem import ProblemFamily
from gemmcache.reference import reference, relative_error
torch.manual_seed(0)
m, n, k = 5, 16, 32
a, b = torch.randn(m, k), torch.randn(n, k)
a[0], a[1] = 4.0 * a[0], torch.nan
errors = {}
for text in json.loads(sys.argv[1]):
    epilogue = Epilogue.parse(text)
    names = epilogue.operands()
    single = epilogue.scale == "tensor"
    shapes = {"scale_a": (1,) if single else (m,), "scale_b": (1,) if single else (n,), "bias": (n,)}
    tensors = {name: torch.randn(shapes.get(name, (m, n))) for name in names}
    expected = reference(ProblemFamily.of(n, k, "float32", text), a, b, tensors)
    for swap in (False, True):
        kernel = efc.PersistentDenseGemmEFCKernel(
            cutlass.Float32, cutlass.Float32, False, (128, 128), (1, 1),
            create_named_epilogue(["efc_config", "out", *names], entry._steps(epilogue, swap)),
        )
        fake = make_fake_tensor(cutlass.Float32, (1,), stride=(1,))
        kernel.efc.analyze_epilogue_with_arguments([fake] * (1 + len(names)))
        turn = (lambda t: t.T.unsqueeze(-1)) if swap else (lambda t: t.unsqueeze(-1))
        out = torch.empty(m, n)
        given = [turn(t) if name == "residual" else t for name, t in tensors.items()]
        kernel.efc.evaluate_on_cpu(turn(a @ b.T), (turn(out), *given))
        errors[f"{text} {swap}"] = relative_error(out, expected)
print(json.dumps(errors))
"""


def test_the_fused_steps_compute_the_reference(tmp_path):
    texts = [*EPILOGUES, "bias+gelu", "residual", "scale_row", "scale_row_column+bias+gelu+residual*0.25"]
    env = environment(tmp_path, tmp_path)
    done = python(EVALUATE, json.dumps(texts), env=env)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert len(errors) == 2 * len(texts)
    assert max(errors.values()) < 1e-6, errors
